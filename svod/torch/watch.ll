; Whether tensors are where they were, were not written as far as PyTorch counts, and hold the same words at some places; 1 or 0.
; The words of %watch are named in watch.py. A function for versions of null: versions are not looked at.
define i64 @svod_unchanged(ptr %watch) nounwind {
entry:
  %now = alloca ptr, align 8
  %p.handles = getelementptr i8, ptr %watch, i64 ${HANDLES}
  %p.addresses = getelementptr i8, ptr %watch, i64 ${ADDRESSES}
  %p.versions = getelementptr i8, ptr %watch, i64 ${VERSIONS}
  %p.address.of = getelementptr i8, ptr %watch, i64 ${ADDRESS_OF}
  %p.version.of = getelementptr i8, ptr %watch, i64 ${VERSION_OF}
  %p.places = getelementptr i8, ptr %watch, i64 ${PLACES}
  %p.words = getelementptr i8, ptr %watch, i64 ${WORDS}
  %p.samples = getelementptr i8, ptr %watch, i64 ${SAMPLES}
  %tensors = load i64, ptr %watch, align 8
  %handles = load ptr, ptr %p.handles, align 8
  %addresses = load ptr, ptr %p.addresses, align 8
  %versions = load ptr, ptr %p.versions, align 8
  %address.of = load ptr, ptr %p.address.of, align 8
  %version.of = load ptr, ptr %p.version.of, align 8
  %places = load ptr, ptr %p.places, align 8
  %words = load ptr, ptr %p.words, align 8
  %samples = load i64, ptr %p.samples, align 8
  %is.counted = icmp ne ptr %version.of, null
  br label %tensor
tensor:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %more = icmp ult i64 %i, %tensors
  br i1 %more, label %address, label %content
address:
  %h.p = getelementptr ptr, ptr %handles, i64 %i
  %h = load ptr, ptr %h.p, align 8
  %failed = call i32 %address.of(ptr %h, ptr %now)
  %known = icmp eq i32 %failed, 0
  br i1 %known, label %same.address, label %changed
same.address:
  %a = load ptr, ptr %now, align 8
  %a.p = getelementptr ptr, ptr %addresses, i64 %i
  %a.then = load ptr, ptr %a.p, align 8
  %stayed = icmp eq ptr %a, %a.then
  br i1 %stayed, label %version, label %changed
version:
  br i1 %is.counted, label %same.version, label %next
same.version:
  %v = call i64 %version.of(ptr %h)
  %v.p = getelementptr i64, ptr %versions, i64 %i
  %v.then = load i64, ptr %v.p, align 8
  %unwritten = icmp eq i64 %v, %v.then
  br i1 %unwritten, label %next, label %changed
next:
  %i.next = add i64 %i, 1
  br label %tensor
content:
  %j = phi i64 [ 0, %tensor ], [ %j.next, %sample ]
  %odd = phi i32 [ 0, %tensor ], [ %odd.next, %sample ]
  %some = icmp ult i64 %j, %samples
  br i1 %some, label %sample, label %end
sample:
  %w.pp = getelementptr ptr, ptr %places, i64 %j
  %w.p = load ptr, ptr %w.pp, align 8
  %w = load i32, ptr %w.p, align 4
  %w.then.p = getelementptr i32, ptr %words, i64 %j
  %w.then = load i32, ptr %w.then.p, align 4
  %differs = xor i32 %w, %w.then
  %odd.next = or i32 %odd, %differs
  %j.next = add i64 %j, 1
  br label %content
end:
  %same = icmp eq i32 %odd, 0
  %result = zext i1 %same to i64
  ret i64 %result
changed:
  ret i64 0
}
