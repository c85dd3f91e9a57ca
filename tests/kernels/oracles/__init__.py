"""What the quantisers are compared with: other libraries' own code, and formulas written a second time.

Every quantiser here is a function of float32 or bfloat16 [R, K] that returns a `Result`.
"""
