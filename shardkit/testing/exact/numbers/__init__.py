"""The numbers of a proof, which stand for floats, and their arithmetic.

Two programs that agree at random points of a finite field are the same function of all inputs, but for a chance that is
their degree over the size of the field (Schwartz and Zippel). So a proof runs both programs on random numbers modulo
primes, exactly, and compares the results. What a field lacks is added in such a way that the laws that programs rely on
hold exactly: exps and logarithms, an order for maxima and comparisons, infinity and NaN.

Worked example. The real tower has eight primes of about 2**24 to 2**31. Here it has three, 5, 11 and 23, each twice the
one before it and 1 more, and there is one random point. A number is its residues modulo the three primes:

    x       = (3, 7,  9)         drawn at random: an input
    y       = (4, 6,  1)         another one
    x y     = (2, 9,  9)         3 * 4 = 12 is 2 modulo 5, 7 * 6 = 42 is 9 modulo 11, 9 * 1 is 9 modulo 23
    1 / 2   = (3, 6, 12)         a constant: 2 * 3 is 1 modulo 5, and so on
    exp(x)  = (-, 9,  8)         4**3 is 9 modulo 11, and 4**7 is 8 modulo 23

4 has order 5 modulo 11, and order 11 modulo 23: the exponent 3, known modulo 5, says what 4**3 is modulo 11. So exp
takes a residue one prime higher, and the lowest prime of the result has no meaning any more: it is "used up". And
because exponents add up modulo the order, exp(x + y) is exp(x) exp(y):

    x + y          = (2, 2, 10)
    exp(x + y)     = (-, 5, 16)  4**2 is 5 modulo 11, 4**2 is 16 modulo 23
    exp(x) exp(y)  = (-, 5, 16)  9 * 3 is 5 modulo 11, 8 * 2 is 16 modulo 23

A division multiplies with the inverse, and an equality compares the residues that have a meaning:

    1 / exp(x)     = (-, 5,  3)  9 * 5 is 1 modulo 11, 8 * 3 is 1 modulo 23
    exp(-x)        = (-, 5,  3)  -x is (2, 4, 14); 4**2 is 5 modulo 11, 4**4 is 3 modulo 23
    exp(x) exp(x)  = (-, 4, 18)  which is not exp(x y) = (-, 5, 13): refuted

Start with `values.py`, which has `Exact`, an array of such numbers, and `arithmetic.py`. What a reader may look for,
from the bottom up:

- how residues are multiplied, inverted and raised to powers: `residues.py`, with the primes of `tower.py` and the
  random functions of `hashing.py`;
- how elements of several arrays are put together: `assembly.py`;
- which rational number a constant stands for: `constants.py`. `computed.py` is of constants that a program computes,
  `folded.py` of those that its compiler has computed;
- what a run is, and what it remembers: the `Field` in `field.py`. `inputs.py` draws its inputs;
- what exp and log do: `logarithms.py`. Which number is the larger one: `orders.py`. What infinity and NaN become:
  `infinities.py`. What tanh is, of which no law is known: `functions.py`;
- why sqrt(x) sqrt(x) is x: `roots.py`, and `square_roots.py`, which applies its laws;
- which integers follow from floats: `marks.py`. How floats are sent as bits: `bits.py`. What ends a run: `errors.py`;
- linear algebra: `elimination.py`, `grams.py` and `matrix_functions.py`.

Imports nothing else of the package: it knows of no jaxpr and of no mesh.
"""
