"""The policy "fast": kernels of a plan are rounded to bfloat16 as long as the plan's outputs stay close enough to those in float32."""
