; Two functions on the cache lines begin ≤ i < end of the memory that args[0] points to.
${DECLARE}

; Write the lines as they are, so that they lie in the caches of the core that does it, and in no other.
define void @svod_own(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) nounwind {
entry:
  %data = load ptr, ptr %args, align 8
  br label %next
next:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %turn ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %turn, label %done
turn:
  %offset = mul i64 %i, ${CACHE_LINE_BYTES}
  %line = getelementptr i8, ptr %data, i64 %offset
  %byte = load volatile i8, ptr %line, align 1
  store volatile i8 %byte, ptr %line, align 1
  %i.next = add i64 %i, 1
  br label %next
done:
  ret void
}

; Remove the lines from all caches.
define void @svod_flush(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) nounwind {
entry:
  %data = load ptr, ptr %args, align 8
  br label %next
next:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %turn ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %turn, label %done
turn:
  %offset = mul i64 %i, ${CACHE_LINE_BYTES}
  %line = getelementptr i8, ptr %data, i64 %offset
  ${FLUSH}
  %i.next = add i64 %i, 1
  br label %next
done:
  fence seq_cst
  ret void
}
