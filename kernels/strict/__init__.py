"""A model outside its experts, in operations whose result for a row depends on that row alone.

Neither the rows beside it, nor padding, nor how a sequence is cut, nor the number of threads, nor the library behind
matrix products can change a bit. That follows from what the operators are made of:

- sums of products are exact: `fixed_point`
- other sums add halves to each other, element by element: `elementary.halves_sum`
- everything else is addition, multiplication, division, square root, comparison and rounding of single elements, each
  a PyTorch call of its own, which IEEE 754 defines to the bit; exponential and logarithm are made of these

`kernels.model_spec.ModelSpec` names the choices. Gradients are those of the usual operations: `gradient`.
"""
