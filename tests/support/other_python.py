"""The compiled module of a wheel in any Python from 3.11 on, without torch and numpy: `python other_python.py FOLDER`.

Merges a matrix of float32 that ctypes holds, and compares with sums in Python.
"""

import ctypes
import struct
import sys

sys.path.insert(0, sys.argv[1])
import _C

ROWS, COLS, RANK, SCALING = 3, 5, 2, 0.5
FLOAT32 = 2
WORDS = 32  # of a segment: csrc/layout.h
source = (ctypes.c_float * (ROWS * COLS))(*range(ROWS * COLS))
out = (ctypes.c_float * (ROWS * COLS))()
lora_A = (ctypes.c_float * (RANK * COLS))(*(i + 1 for i in range(RANK * COLS)))
lora_B = (ctypes.c_float * (ROWS * RANK))(*(2 * i - 3 for i in range(ROWS * RANK)))
words = [ctypes.addressof(t) for t in (source, out, lora_A, lora_B)] + [0, ROWS, COLS, RANK]
words += [COLS, 1, COLS, 1, COLS, 1, RANK, 1]  # strides
words += [struct.unpack("q", struct.pack("d", SCALING))[0]]
words += [FLOAT32 | FLOAT32 << 8 | FLOAT32 << 16 | FLOAT32 << 24, 7, 0, COLS, 1]
words += [0] * (WORDS - len(words))  # nothing is packed; the backend sets the last two
table = (ctypes.c_int64 * len(words))(*words)
_C.launch_cpu(ctypes.addressof(table), 1, False, 0)
for i in range(ROWS):
    for j in range(COLS):
        delta = sum(lora_B[i * RANK + k] * lora_A[k * COLS + j] for k in range(RANK))
        assert out[i * COLS + j] == source[i * COLS + j] + SCALING * delta, (i, j)
told = ""
try:
    _C.launch_cpu(1)
except TypeError as error:
    told = str(error)
assert "takes 4 arguments, got 1" in told
print(f"python {sys.version.split()[0]}: {', '.join(_C.cpu_isas())}; GPUs: {', '.join(_C.cuda_architectures())}")
