
${DECLARE}

; Claim chunks of the job that `latest` names and run them until none is left, those of the thread's own share first. Returns their number.
define internal i64 @take(ptr %pool, i64 %latest, i64 %index, ptr %scratch) nounwind {
entry:
  %p.entry = getelementptr i8, ptr %pool, i64 ${JOB_ENTRY}
  %p.args = getelementptr i8, ptr %pool, i64 ${JOB_ARGS}
  %p.vars = getelementptr i8, ptr %pool, i64 ${JOB_VARS}
  %p.begin = getelementptr i8, ptr %pool, i64 ${JOB_BEGIN}
  %p.quotient = getelementptr i8, ptr %pool, i64 ${JOB_QUOTIENT}
  %p.remainder = getelementptr i8, ptr %pool, i64 ${JOB_REMAINDER}
  %p.share = getelementptr i8, ptr %pool, i64 ${JOB_SHARE}
  %p.longer = getelementptr i8, ptr %pool, i64 ${JOB_LONGER}
  %p.tickets = getelementptr i8, ptr %pool, i64 ${TICKETS}
  %l.threads = lshr i64 %latest, 22
  %shares = and i64 %l.threads, ${MAX_THREADS}
  %invited = icmp ult i64 %index, %shares
  br i1 %invited, label %share, label %end
share:
  %s = phi i64 [ 0, %entry ], [ %s.next, %empty ]
  %v = phi i64 [ %index, %entry ], [ %v.next, %empty ]
  %done.s = phi i64 [ 0, %entry ], [ %done, %empty ]
  %v.slot = mul i64 %v, ${WORKER_STRIDE}
  %p.ticket = getelementptr i8, ptr %p.tickets, i64 %v.slot
  br label %look
look:
  %done = phi i64 [ %done.s, %share ], [ %done, %claim ], [ %more, %run ]
  %t = load atomic i64, ptr %p.ticket acquire, align 64
  %left = and i64 %t, ${MAX_CHUNKS}
  %t.threads = lshr i64 %t, 22
  %threads = and i64 %t.threads, ${MAX_THREADS}
  %some = icmp ne i64 %left, 0
  %mine = icmp ult i64 %index, %threads
  %go = and i1 %some, %mine
  br i1 %go, label %claim, label %empty
empty:
  %s.next = add i64 %s, 1
  %v.up = add i64 %v, 1
  %around = icmp uge i64 %v.up, %shares
  %v.next = select i1 %around, i64 0, i64 %v.up
  %others = icmp ult i64 %s.next, %shares
  br i1 %others, label %share, label %end
claim:
  %t.next = sub i64 %t, 1
  %swap = cmpxchg ptr %p.ticket, i64 %t, i64 %t.next acq_rel acquire, align 64
  %ok = extractvalue { i64, i1 } %swap, 1
  br i1 %ok, label %run, label %look
run:
  %f = load ptr, ptr %p.entry, align 8
  %args = load ptr, ptr %p.args, align 8
  %vars = load ptr, ptr %p.vars, align 8
  %first = load i64, ptr %p.begin, align 8
  %quotient = load i64, ptr %p.quotient, align 8
  %remainder = load i64, ptr %p.remainder, align 8
  %j.share = load i64, ptr %p.share, align 8
  %j.longer = load i64, ptr %p.longer, align 8
  ; the share ends where the next one begins, at (v + 1) · share + min(v + 1, longer); the claimed chunk is `left` chunks before that
  %v.1 = add i64 %v, 1
  %v.long = icmp ult i64 %v.1, %j.longer
  %v.extra = select i1 %v.long, i64 %v.1, i64 %j.longer
  %v.q = mul i64 %v.1, %j.share
  %v.end = add i64 %v.q, %v.extra
  %k = sub i64 %v.end, %left
  ; chunk k begins at k · quotient + ⌈k · remainder / chunks⌉: chunks with one more iteration are spread over all shares
  %t.share = mul i64 %threads, %j.share
  %chunks = add i64 %t.share, %j.longer
  %up = sub i64 %chunks, 1
  %k.next = add i64 %k, 1
  %k.r = mul i64 %k, %remainder
  %k.up = add i64 %k.r, %up
  %k.extra = udiv i64 %k.up, %chunks
  %n.up = add i64 %k.up, %remainder
  %n.extra = udiv i64 %n.up, %chunks
  %k.q = mul i64 %k, %quotient
  %n.q = mul i64 %k.next, %quotient
  %offset = add i64 %k.q, %k.extra
  %offset.end = add i64 %n.q, %n.extra
  %begin = add i64 %first, %offset
  %end.i = add i64 %first, %offset.end
  call void %f(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end.i)
  %more = add i64 %done, 1
  br label %look
end:
  %total = phi i64 [ 0, %entry ], [ %done, %empty ]
  ret i64 %total
}

; The loop of a worker: run chunks, spin, sleep, until the pool is stopped.
define void @svod_worker(ptr %pool, i64 %index) nounwind {
entry:
  %p.pending = getelementptr i8, ptr %pool, i64 ${PENDING}
  %p.sleepers = getelementptr i8, ptr %pool, i64 ${SLEEPERS}
  %p.stop = getelementptr i8, ptr %pool, i64 ${CFG_STOP}
  %p.spin = getelementptr i8, ptr %pool, i64 ${CFG_SPIN}
  %p.nap = getelementptr i8, ptr %pool, i64 ${CFG_NAP}
  %p.futex = getelementptr i8, ptr %pool, i64 ${CFG_FUTEX}
  %p.syscall = getelementptr i8, ptr %pool, i64 ${CFG_SYSCALL}
  %p.sleep = getelementptr i8, ptr %pool, i64 ${CFG_SLEEP}
  %slot = mul i64 %index, ${WORKER_STRIDE}
  %slot.base = add i64 %slot, ${WORKERS}
  %p.flag = getelementptr i8, ptr %pool, i64 %slot.base
  %p.scratch = getelementptr i8, ptr %p.flag, i64 ${WORKER_SCRATCH}
  %spin = load i64, ptr %p.spin, align 8
  %futex = load i64, ptr %p.futex, align 8
  %syscall = load ptr, ptr %p.syscall, align 8
  %sleep = load ptr, ptr %p.sleep, align 8
  %nap = load i64, ptr %p.nap, align 8
  %nap32 = trunc i64 %nap to i32
  %has.futex = icmp ne i64 %futex, 0
  br label %spinning
spinning:
  %i = phi i64 [ 0, %entry ], [ 0, %report ], [ %i.next, %idle ], [ 0, %woken ], [ 0, %awake ], [ %spin, %doze ]
  %seen = phi i64 [ 0, %entry ], [ %l, %report ], [ %l, %idle ], [ %l, %woken ], [ %l, %awake ], [ %l, %doze ]
  %l = load atomic i64, ptr %pool acquire, align 64
  %new = icmp ne i64 %l, %seen
  br i1 %new, label %work, label %idle
work:
  %scratch.i = load atomic i64, ptr %p.scratch acquire, align 8
  %scratch = inttoptr i64 %scratch.i to ptr
  %done = call i64 @take(ptr %pool, i64 %l, i64 %index, ptr %scratch)
  %any = icmp ne i64 %done, 0
  br i1 %any, label %report, label %idle
report:
  %before = atomicrmw sub ptr %p.pending, i64 %done release, align 64
  br label %spinning
idle:
  ${PAUSE}
  %i.next = add i64 %i, 1
  %patient = icmp ult i64 %i.next, %spin
  br i1 %patient, label %spinning, label %tired
tired:
  %stop = load atomic i64, ptr %p.stop seq_cst, align 8
  %stopped = icmp ne i64 %stop, 0
  br i1 %stopped, label %end, label %rest
rest:
  br i1 %has.futex, label %lie.down, label %doze
doze:
  %slept = call i32 %sleep(i32 %nap32)
  br label %spinning
lie.down:
  store atomic i32 1, ptr %p.flag seq_cst, align 64
  %s.before = atomicrmw add ptr %p.sleepers, i64 1 seq_cst, align 64
  %l2 = load atomic i64, ptr %pool seq_cst, align 64
  %l2.threads = lshr i64 %l2, 22
  %threads2 = and i64 %l2.threads, ${MAX_THREADS}
  %new2 = icmp ne i64 %l2, %l
  %mine2 = icmp ult i64 %index, %threads2
  %work2 = and i1 %new2, %mine2
  %stop2 = load atomic i64, ptr %p.stop seq_cst, align 8
  %stopped2 = icmp ne i64 %stop2, 0
  %up = or i1 %work2, %stopped2
  br i1 %up, label %get.up, label %wait
get.up:
  %flag.old = atomicrmw xchg ptr %p.flag, i32 0 seq_cst, align 64
  %own = icmp eq i32 %flag.old, 1
  br i1 %own, label %count, label %awake
count:
  %s.before2 = atomicrmw sub ptr %p.sleepers, i64 1 seq_cst, align 64
  br label %awake
awake:
  br label %spinning
wait:
  %w = call i64 (i64, ...) %syscall(i64 %futex, ptr %p.flag, i64 128, i64 1, ptr null)
  %flag = load atomic i32, ptr %p.flag seq_cst, align 64
  %still = icmp eq i32 %flag, 1
  br i1 %still, label %wait, label %woken
woken:
  br label %spinning
end:
  ret void
}

; Wake the workers among 1 … threads-1 that sleep.
define internal void @wake(ptr %pool, i64 %threads) nounwind {
entry:
  %p.sleepers = getelementptr i8, ptr %pool, i64 ${SLEEPERS}
  %p.futex = getelementptr i8, ptr %pool, i64 ${CFG_FUTEX}
  %p.syscall = getelementptr i8, ptr %pool, i64 ${CFG_SYSCALL}
  %futex = load i64, ptr %p.futex, align 8
  %syscall = load ptr, ptr %p.syscall, align 8
  br label %next
next:
  %i = phi i64 [ 1, %entry ], [ %i.next, %step ]
  %more = icmp ult i64 %i, %threads
  br i1 %more, label %look, label %end
look:
  %slot = mul i64 %i, ${WORKER_STRIDE}
  %slot.base = add i64 %slot, ${WORKERS}
  %p.flag = getelementptr i8, ptr %pool, i64 %slot.base
  %flag = load atomic i32, ptr %p.flag seq_cst, align 64
  %asleep = icmp eq i32 %flag, 1
  br i1 %asleep, label %lower, label %step
lower:
  %old = atomicrmw xchg ptr %p.flag, i32 0 seq_cst, align 64
  %own = icmp eq i32 %old, 1
  br i1 %own, label %call, label %step
call:
  %s.before = atomicrmw sub ptr %p.sleepers, i64 1 seq_cst, align 64
  %w = call i64 (i64, ...) %syscall(i64 %futex, ptr %p.flag, i64 129, i64 1)
  br label %step
step:
  %i.next = add i64 %i, 1
  br label %next
end:
  ret void
}

; Move the calling thread off a worker's core, then restore its affinity mask: the thread stays on the core that it was moved to.
define internal void @leave_worker_core(ptr %pool) nounwind {
entry:
  %mask = alloca [${CORES_BYTES} x i8], align 8
  %rest = alloca [${CORES_BYTES} x i8], align 8
  %p.getcpu = getelementptr i8, ptr %pool, i64 ${CFG_GETCPU}
  %p.syscall = getelementptr i8, ptr %pool, i64 ${CFG_SYSCALL}
  %p.getaffinity = getelementptr i8, ptr %pool, i64 ${CFG_GETAFFINITY}
  %p.setaffinity = getelementptr i8, ptr %pool, i64 ${CFG_SETAFFINITY}
  %p.cores = getelementptr i8, ptr %pool, i64 ${CORES}
  %getcpu = load ptr, ptr %p.getcpu, align 8
  %known = icmp ne ptr %getcpu, null
  br i1 %known, label %ask, label %end
ask:
  %cpu = call i32 %getcpu()
  %valid = icmp ult i32 %cpu, ${CORE_COUNT}
  br i1 %valid, label %test, label %end
test:
  %byte.i = lshr i32 %cpu, 3
  %byte.p = getelementptr i8, ptr %p.cores, i32 %byte.i
  %byte = load i8, ptr %byte.p
  %bit.i = and i32 %cpu, 7
  %bit.8 = trunc i32 %bit.i to i8
  %shifted = lshr i8 %byte, %bit.8
  %bit = and i8 %shifted, 1
  %on = icmp ne i8 %bit, 0
  br i1 %on, label %read, label %end
read:
  %syscall = load ptr, ptr %p.syscall, align 8
  %getaffinity = load i64, ptr %p.getaffinity, align 8
  %setaffinity = load i64, ptr %p.setaffinity, align 8
  store [${CORE_WORDS} x i64] zeroinitializer, ptr %mask, align 8
  %n = call i64 (i64, ...) %syscall(i64 %getaffinity, i64 0, i64 ${CORES_BYTES}, ptr %mask)
  %got = icmp sgt i64 %n, 0
  br i1 %got, label %words, label %end
words:
  %i = phi i64 [ 0, %read ], [ %i.next, %words ]
  %any = phi i64 [ 0, %read ], [ %any.next, %words ]
  %m.p = getelementptr i64, ptr %mask, i64 %i
  %c.p = getelementptr i64, ptr %p.cores, i64 %i
  %r.p = getelementptr i64, ptr %rest, i64 %i
  %m = load i64, ptr %m.p
  %c = load i64, ptr %c.p
  %c.not = xor i64 %c, -1
  %r = and i64 %m, %c.not
  store i64 %r, ptr %r.p
  %any.next = or i64 %any, %r
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, ${CORE_WORDS}
  br i1 %more, label %words, label %decide
decide:
  %free = icmp ne i64 %any.next, 0
  br i1 %free, label %move, label %end
move:
  %a = call i64 (i64, ...) %syscall(i64 %setaffinity, i64 0, i64 ${CORES_BYTES}, ptr %rest)
  %b = call i64 (i64, ...) %syscall(i64 %setaffinity, i64 0, i64 ${CORES_BYTES}, ptr %mask)
  br label %end
end:
  ret void
}

; Distribute a launch to the workers. The caller holds the pool's lock.
define internal void @launch(ptr %pool, ptr %rec, ptr %scratch) nounwind noinline {
entry:
  %p.pending = getelementptr i8, ptr %pool, i64 ${PENDING}
  %p.sleepers = getelementptr i8, ptr %pool, i64 ${SLEEPERS}
  %p.patience = getelementptr i8, ptr %pool, i64 ${CFG_PATIENCE}
  %p.yield = getelementptr i8, ptr %pool, i64 ${CFG_YIELD}
  %r.args = getelementptr i8, ptr %rec, i64 ${LAUNCH_ARGS}
  %r.vars = getelementptr i8, ptr %rec, i64 ${LAUNCH_VARS}
  %r.begin = getelementptr i8, ptr %rec, i64 ${LAUNCH_BEGIN}
  %r.end = getelementptr i8, ptr %rec, i64 ${LAUNCH_END}
  %r.threads = getelementptr i8, ptr %rec, i64 ${LAUNCH_THREADS}
  %r.chunks = getelementptr i8, ptr %rec, i64 ${LAUNCH_CHUNKS}
  %f = load ptr, ptr %rec, align 8
  %args = load ptr, ptr %r.args, align 8
  %vars = load ptr, ptr %r.vars, align 8
  %begin = load i64, ptr %r.begin, align 8
  %end.i = load i64, ptr %r.end, align 8
  %threads = load i64, ptr %r.threads, align 8
  %chunks = load i64, ptr %r.chunks, align 8
  %extent = sub i64 %end.i, %begin
  %quotient = udiv i64 %extent, %chunks
  %q.c = mul i64 %quotient, %chunks
  %remainder = sub i64 %extent, %q.c
  %j.entry = getelementptr i8, ptr %pool, i64 ${JOB_ENTRY}
  store ptr %f, ptr %j.entry, align 8
  %j.args = getelementptr i8, ptr %pool, i64 ${JOB_ARGS}
  store ptr %args, ptr %j.args, align 8
  %j.vars = getelementptr i8, ptr %pool, i64 ${JOB_VARS}
  store ptr %vars, ptr %j.vars, align 8
  %j.begin = getelementptr i8, ptr %pool, i64 ${JOB_BEGIN}
  store i64 %begin, ptr %j.begin, align 8
  %j.quotient = getelementptr i8, ptr %pool, i64 ${JOB_QUOTIENT}
  store i64 %quotient, ptr %j.quotient, align 8
  %j.remainder = getelementptr i8, ptr %pool, i64 ${JOB_REMAINDER}
  store i64 %remainder, ptr %j.remainder, align 8
  %share = udiv i64 %chunks, %threads
  %s.t = mul i64 %share, %threads
  %longer = sub i64 %chunks, %s.t
  %j.share = getelementptr i8, ptr %pool, i64 ${JOB_SHARE}
  store i64 %share, ptr %j.share, align 8
  %j.longer = getelementptr i8, ptr %pool, i64 ${JOB_LONGER}
  store i64 %longer, ptr %j.longer, align 8
  store atomic i64 %chunks, ptr %p.pending monotonic, align 64
  %old = load atomic i64, ptr %pool monotonic, align 64
  %gen.old = lshr i64 %old, 32
  %gen = add i64 %gen.old, 1
  %gen.high = shl i64 %gen, 32
  %threads.mid = shl i64 %threads, 22
  %latest = or i64 %gen.high, %threads.mid
  %p.tickets = getelementptr i8, ptr %pool, i64 ${TICKETS}
  br label %publish
publish:
  %v = phi i64 [ 0, %entry ], [ %v.next, %publish ]
  %v.long = icmp ult i64 %v, %longer
  %v.one = zext i1 %v.long to i64
  %v.chunks = add i64 %share, %v.one
  %ticket = or i64 %latest, %v.chunks
  %v.slot = mul i64 %v, ${WORKER_STRIDE}
  %p.ticket = getelementptr i8, ptr %p.tickets, i64 %v.slot
  store atomic i64 %ticket, ptr %p.ticket release, align 64
  %v.next = add i64 %v, 1
  %unpublished = icmp ult i64 %v.next, %threads
  br i1 %unpublished, label %publish, label %published
published:
  store atomic i64 %latest, ptr %pool seq_cst, align 64
  %sleepers = load atomic i64, ptr %p.sleepers seq_cst, align 64
  %asleep = icmp sgt i64 %sleepers, 0
  br i1 %asleep, label %rouse, label %help
rouse:
  call void @leave_worker_core(ptr %pool)
  call void @wake(ptr %pool, i64 %threads)
  br label %help
help:
  %done = call i64 @take(ptr %pool, i64 %latest, i64 0, ptr %scratch)
  %before = atomicrmw sub ptr %p.pending, i64 %done acq_rel, align 64
  %all = icmp eq i64 %before, %done
  br i1 %all, label %end, label %wait.begin
wait.begin:
  %patience = load i64, ptr %p.patience, align 8
  %yield = load ptr, ptr %p.yield, align 8
  br label %wait
wait:
  %i = phi i64 [ 0, %wait.begin ], [ %i.next, %still ], [ %patience, %give.way ]
  %pending = load atomic i64, ptr %p.pending acquire, align 64
  %over = icmp eq i64 %pending, 0
  br i1 %over, label %end, label %still
still:
  ${PAUSE}
  %i.next = add i64 %i, 1
  %patient = icmp ult i64 %i.next, %patience
  br i1 %patient, label %wait, label %late
late:
  %first = icmp eq i64 %i.next, %patience
  br i1 %first, label %move, label %give.way
move:
  call void @leave_worker_core(ptr %pool)
  br label %give.way
give.way:
  %y = call i32 %yield()
  br label %wait
end:
  ret void
}

; Run the launches of a plan `repeats` times.
define void @svod_run_plan(ptr %plan) nounwind {
entry:
  %p.count = getelementptr i8, ptr %plan, i64 ${PLAN_COUNT}
  %p.pool = getelementptr i8, ptr %plan, i64 ${PLAN_POOL}
  %p.scratch = getelementptr i8, ptr %plan, i64 ${PLAN_SCRATCH}
  %p.repeats = getelementptr i8, ptr %plan, i64 ${PLAN_REPEATS}
  %records = load ptr, ptr %plan, align 8
  %count = load i64, ptr %p.count, align 8
  %pool = load ptr, ptr %p.pool, align 8
  %scratch = load ptr, ptr %p.scratch, align 8
  %repeats = load i64, ptr %p.repeats, align 8
  %p.lock = getelementptr i8, ptr %pool, i64 ${LOCK}
  %has.pool = icmp ne ptr %pool, null
  %total = mul i64 %count, ${LAUNCH_BYTES}
  %last = getelementptr i8, ptr %records, i64 %total
  br label %repeat
repeat:
  %r = phi i64 [ 0, %entry ], [ %r.next, %repeat.end ]
  %held.r = phi i1 [ false, %entry ], [ %held, %repeat.end ]
  %go = icmp slt i64 %r, %repeats
  br i1 %go, label %record, label %finish
record:
  %rec = phi ptr [ %records, %repeat ], [ %rec.next, %step ]
  %held = phi i1 [ %held.r, %repeat ], [ %held.next, %step ]
  %at.end = icmp eq ptr %rec, %last
  br i1 %at.end, label %repeat.end, label %bounds
bounds:
  %r.begin = getelementptr i8, ptr %rec, i64 ${LAUNCH_BEGIN}
  %r.end = getelementptr i8, ptr %rec, i64 ${LAUNCH_END}
  %r.threads = getelementptr i8, ptr %rec, i64 ${LAUNCH_THREADS}
  %begin = load i64, ptr %r.begin, align 8
  %end.i = load i64, ptr %r.end, align 8
  %threads = load i64, ptr %r.threads, align 8
  %some = icmp slt i64 %begin, %end.i
  br i1 %some, label %choose, label %step
choose:
  %wants = icmp sgt i64 %threads, 1
  %shared = and i1 %wants, %has.pool
  br i1 %shared, label %pool.wanted, label %alone
pool.wanted:
  br i1 %held, label %parallel, label %try
try:
  %taken = load atomic i64, ptr %p.lock monotonic, align 64
  %busy = icmp ne i64 %taken, 0
  br i1 %busy, label %alone, label %grab
grab:
  %lock.old = atomicrmw xchg ptr %p.lock, i64 1 acquire, align 64
  %got = icmp eq i64 %lock.old, 0
  br i1 %got, label %parallel, label %alone
parallel:
  call void @launch(ptr %pool, ptr %rec, ptr %scratch)
  br label %step
alone:
  %r.args = getelementptr i8, ptr %rec, i64 ${LAUNCH_ARGS}
  %r.vars = getelementptr i8, ptr %rec, i64 ${LAUNCH_VARS}
  %f = load ptr, ptr %rec, align 8
  %args = load ptr, ptr %r.args, align 8
  %vars = load ptr, ptr %r.vars, align 8
  call void %f(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end.i)
  br label %step
step:
  %held.next = phi i1 [ %held, %bounds ], [ true, %parallel ], [ %held, %alone ]
  %rec.next = getelementptr i8, ptr %rec, i64 ${LAUNCH_BYTES}
  br label %record
repeat.end:
  %r.next = add i64 %r, 1
  br label %repeat
finish:
  br i1 %held.r, label %release, label %end
release:
  store atomic i64 0, ptr %p.lock release, align 64
  br label %end
end:
  ret void
}

; Entry of a launch whose iterations are launch records (args): it runs independent single-core launches as one parallel loop.
define void @svod_run_group(ptr %records, ptr %vars, ptr %scratch, i64 %begin, i64 %end) nounwind {
entry:
  br label %next
next:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %call ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %call, label %done
call:
  %offset = mul i64 %i, ${LAUNCH_BYTES}
  %rec = getelementptr i8, ptr %records, i64 %offset
  %r.args = getelementptr i8, ptr %rec, i64 ${LAUNCH_ARGS}
  %r.vars = getelementptr i8, ptr %rec, i64 ${LAUNCH_VARS}
  %r.begin = getelementptr i8, ptr %rec, i64 ${LAUNCH_BEGIN}
  %r.end = getelementptr i8, ptr %rec, i64 ${LAUNCH_END}
  %f = load ptr, ptr %rec, align 8
  %f.args = load ptr, ptr %r.args, align 8
  %f.vars = load ptr, ptr %r.vars, align 8
  %f.begin = load i64, ptr %r.begin, align 8
  %f.end = load i64, ptr %r.end, align 8
  call void %f(ptr %f.args, ptr %f.vars, ptr %scratch, i64 %f.begin, i64 %f.end)
  %i.next = add i64 %i, 1
  br label %next
done:
  ret void
}

; Tell all workers to return; `threads` counts the caller.
define void @svod_stop(ptr %pool, i64 %threads) nounwind {
  %p.stop = getelementptr i8, ptr %pool, i64 ${CFG_STOP}
  store atomic i64 1, ptr %p.stop seq_cst, align 8
  call void @wake(ptr %pool, i64 %threads)
  ret void
}

; Run n iterations of the worker's waiting loop, to measure how long one takes.
define void @svod_spin(ptr %pool, i64 %n) nounwind {
entry:
  br label %next
next:
  %i = phi i64 [ 0, %entry ], [ %i.next, %turn ]
  %go = icmp slt i64 %i, %n
  br i1 %go, label %turn, label %done
turn:
  %t = load atomic i64, ptr %pool monotonic, align 64
  ${PAUSE}
  %i.next = add i64 %i, 1
  br label %next
done:
  ret void
}
