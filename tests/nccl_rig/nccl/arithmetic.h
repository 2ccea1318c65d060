// Reductions on host memory.
#ifndef NCCL_RIG_NCCL_ARITHMETIC_H_
#define NCCL_RIG_NCCL_ARITHMETIC_H_

#include <cstddef>
#include <functional>

// Reads `count` elements from `first` on of what rank `peer` gave.
using Reader = std::function<bool(int peer, size_t first, size_t count, void* to)>;

// to[i] = reduction over the peers of scale[peer] * theirs[begin + i].  Sixteen-bit floats are
// summed in 32 bits and rounded once, in rank order on every rank.  False: cannot be reduced, or
// not read.
bool reduce(int datatype, int reduction, int peers, const double* scales, size_t begin,
            size_t count, const Reader& read, void* to);

// The value of a scalar of that type.
double scalar(int datatype, const void* from);

#endif  // NCCL_RIG_NCCL_ARITHMETIC_H_
