; Whether tensors are where they were, in the form they had, were not written as far as PyTorch counts, and hold the same words at some
; places; 1 or 0. The words of %watch are named in watch.py. A function for versions of null: versions are not looked at.
define i64 @svod_unchanged(ptr %watch) nounwind {
entry:
  %now = alloca ptr, align 8
  %type.now = alloca i32, align 4
  %axes.now = alloca i64, align 8
  %sizes.now = alloca ptr, align 8
  %strides.now = alloca ptr, align 8
  %p.handles = getelementptr i8, ptr %watch, i64 ${HANDLES}
  %p.addresses = getelementptr i8, ptr %watch, i64 ${ADDRESSES}
  %p.forms = getelementptr i8, ptr %watch, i64 ${FORMS}
  %p.versions = getelementptr i8, ptr %watch, i64 ${VERSIONS}
  %p.address.of = getelementptr i8, ptr %watch, i64 ${ADDRESS_OF}
  %p.type.of = getelementptr i8, ptr %watch, i64 ${TYPE_OF}
  %p.axes.of = getelementptr i8, ptr %watch, i64 ${AXES_OF}
  %p.sizes.of = getelementptr i8, ptr %watch, i64 ${SIZES_OF}
  %p.strides.of = getelementptr i8, ptr %watch, i64 ${STRIDES_OF}
  %p.version.of = getelementptr i8, ptr %watch, i64 ${VERSION_OF}
  %p.places = getelementptr i8, ptr %watch, i64 ${PLACES}
  %p.words = getelementptr i8, ptr %watch, i64 ${WORDS}
  %p.samples = getelementptr i8, ptr %watch, i64 ${SAMPLES}
  %tensors = load i64, ptr %watch, align 8
  %handles = load ptr, ptr %p.handles, align 8
  %addresses = load ptr, ptr %p.addresses, align 8
  %forms = load ptr, ptr %p.forms, align 8
  %versions = load ptr, ptr %p.versions, align 8
  %address.of = load ptr, ptr %p.address.of, align 8
  %type.of = load ptr, ptr %p.type.of, align 8
  %axes.of = load ptr, ptr %p.axes.of, align 8
  %sizes.of = load ptr, ptr %p.sizes.of, align 8
  %strides.of = load ptr, ptr %p.strides.of, align 8
  %version.of = load ptr, ptr %p.version.of, align 8
  %places = load ptr, ptr %p.places, align 8
  %words = load ptr, ptr %p.words, align 8
  %samples = load i64, ptr %p.samples, align 8
  %is.counted = icmp ne ptr %version.of, null
  br label %tensor
tensor:
  %i = phi i64 [ 0, %entry ], [ %i.next, %next ]
  %form = phi ptr [ %forms, %entry ], [ %form.next, %next ]
  %more = icmp ult i64 %i, %tensors
  br i1 %more, label %ask, label %content
ask:
  %h.p = getelementptr ptr, ptr %handles, i64 %i
  %h = load ptr, ptr %h.p, align 8
  %failed.a = call i32 %address.of(ptr %h, ptr %now)
  %failed.t = call i32 %type.of(ptr %h, ptr %type.now)
  %failed.n = call i32 %axes.of(ptr %h, ptr %axes.now)
  %failed.s = call i32 %sizes.of(ptr %h, ptr %sizes.now)
  %failed.d = call i32 %strides.of(ptr %h, ptr %strides.now)
  %failed.at = or i32 %failed.a, %failed.t
  %failed.ns = or i32 %failed.n, %failed.s
  %failed.nsd = or i32 %failed.ns, %failed.d
  %failed = or i32 %failed.at, %failed.nsd
  %known = icmp eq i32 %failed, 0
  br i1 %known, label %same.address, label %changed
same.address:
  %a = load ptr, ptr %now, align 8
  %a.p = getelementptr ptr, ptr %addresses, i64 %i
  %a.then = load ptr, ptr %a.p, align 8
  %stayed = icmp eq ptr %a, %a.then
  %type.32 = load i32, ptr %type.now, align 4
  %type = sext i32 %type.32 to i64
  %type.then = load i64, ptr %form, align 8
  %same.type = icmp eq i64 %type, %type.then
  %axes = load i64, ptr %axes.now, align 8
  %axes.p = getelementptr i64, ptr %form, i64 1
  %axes.then = load i64, ptr %axes.p, align 8
  %same.axes = icmp eq i64 %axes, %axes.then
  %same.kind = and i1 %same.type, %same.axes
  %same.head = and i1 %stayed, %same.kind
  br i1 %same.head, label %layout, label %changed
layout:
  %sizes = load ptr, ptr %sizes.now, align 8
  %strides = load ptr, ptr %strides.now, align 8
  %sizes.then = getelementptr i64, ptr %form, i64 2
  %strides.then = getelementptr i64, ptr %sizes.then, i64 %axes
  %form.next = getelementptr i64, ptr %strides.then, i64 %axes
  br label %axis
axis:
  %k = phi i64 [ 0, %layout ], [ %k.next, %same.axis ]
  %is.axis = icmp ult i64 %k, %axes
  br i1 %is.axis, label %compare, label %version
compare:
  %size.p = getelementptr i64, ptr %sizes, i64 %k
  %size = load i64, ptr %size.p, align 8
  %size.then.p = getelementptr i64, ptr %sizes.then, i64 %k
  %size.then = load i64, ptr %size.then.p, align 8
  %same.size = icmp eq i64 %size, %size.then
  %stride.p = getelementptr i64, ptr %strides, i64 %k
  %stride = load i64, ptr %stride.p, align 8
  %stride.then.p = getelementptr i64, ptr %strides.then, i64 %k
  %stride.then = load i64, ptr %stride.then.p, align 8
  %same.stride = icmp eq i64 %stride, %stride.then
  %same.both = and i1 %same.size, %same.stride
  br i1 %same.both, label %same.axis, label %changed
same.axis:
  %k.next = add i64 %k, 1
  br label %axis
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
