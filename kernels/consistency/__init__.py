"""Whether two engines quantise alike, as a test suite for their continuous integration:

pytest -p kernels.consistency.plugin --pyargs kernels.consistency \\
    --learner-quantizer module:function --sampler-quantizer module:function [--spec NAME]
"""
