#include "arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "types.h"

namespace {

constexpr size_t kBlock = 32768;  // elements

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Bfloat16 {
  uint16_t raw;
  static float load(Bfloat16 value) { return bits<float>(uint32_t{value.raw} << 16); }
  static Bfloat16 store(float value) {
    const uint32_t raw = bits<uint32_t>(value);
    if (std::isnan(value)) return {0x7fc0};
    return {static_cast<uint16_t>((raw + 0x7fff + (raw >> 16 & 1)) >> 16)};  // to nearest even
  }
};

struct Float16 {
  uint16_t raw;
  static float load(Float16 value) {
    const uint32_t sign = uint32_t{value.raw} >> 15 << 31;
    const int exponent = value.raw >> 10 & 31, mantissa = value.raw & 1023;
    float magnitude;
    if (exponent == 31) {
      magnitude = mantissa != 0 ? NAN : INFINITY;
    } else if (exponent == 0) {
      magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    } else {
      magnitude = std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    }
    return bits<float>(bits<uint32_t>(magnitude) | sign);
  }
  static Float16 store(float value) {
    const auto sign = static_cast<uint16_t>(bits<uint32_t>(value) >> 31 << 15);
    const float magnitude = std::fabs(value);
    uint16_t raw;
    if (std::isnan(value)) {
      raw = 0x7e00;
    } else if (magnitude >= 65520.0F) {  // rounds to beyond the largest, 65504
      raw = 0x7c00;
    } else if (magnitude < 0x1p-14F) {
      raw = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
    } else {
      // The carry of the rounding runs into the exponent, as it should.
      uint32_t wide = bits<uint32_t>(magnitude);
      wide += 0xfff + (wide >> 13 & 1);
      raw = static_cast<uint16_t>((wide - (112U << 23)) >> 13);
    }
    return {static_cast<uint16_t>(raw | sign)};
  }
};

template <class T>
struct Plain {
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};

template <class A>
A combine(int reduction, A one, A other) {
  switch (reduction) {
    case kProd:
      return static_cast<A>(one * other);
    case kMax:
      return std::max(one, other);
    case kMin:
      return std::min(one, other);
    default:
      return static_cast<A>(one + other);
  }
}

// T is what is stored, A what is calculated with, C how to get from one to the other.
template <class T, class A, class C>
bool reduce_as(int reduction, int peers, const double* scales, size_t begin, size_t count,
               const Reader& read, void* to) {
  const size_t room = std::min(count, kBlock);
  std::vector<T> theirs(room);
  std::vector<A> sums(room);
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t block = std::min(kBlock, count - at);
    for (int peer = 0; peer < peers; peer++) {
      if (!read(peer, begin + at, block, theirs.data())) return false;
      for (size_t i = 0; i < block; i++) {
        A value = C::load(theirs[i]);
        if (scales[peer] != 1.0) value = static_cast<A>(static_cast<double>(value) * scales[peer]);
        sums[i] = peer == 0 ? value : combine<A>(reduction, sums[i], value);
      }
    }
    for (size_t i = 0; i < block; i++) {
      if (reduction == kAvg) sums[i] = static_cast<A>(sums[i] / static_cast<A>(peers));
      theirs[i] = C::store(sums[i]);
    }
    std::memcpy(static_cast<char*>(to) + at * sizeof(T), theirs.data(), block * sizeof(T));
  }
  return true;
}

}  // namespace

bool reduce(int datatype, int reduction, int peers, const double* scales, size_t begin,
            size_t count, const Reader& read, void* to) {
  const auto as = [&](auto function) {
    return function(reduction, peers, scales, begin, count, read, to);
  };
  switch (datatype) {
    case kInt8:
      return as(reduce_as<int8_t, int8_t, Plain<int8_t>>);
    case kUint8:
      return as(reduce_as<uint8_t, uint8_t, Plain<uint8_t>>);
    case kInt32:
      return as(reduce_as<int32_t, int32_t, Plain<int32_t>>);
    case kUint32:
      return as(reduce_as<uint32_t, uint32_t, Plain<uint32_t>>);
    case kInt64:
      return as(reduce_as<int64_t, int64_t, Plain<int64_t>>);
    case kUint64:
      return as(reduce_as<uint64_t, uint64_t, Plain<uint64_t>>);
    case kFloat16:
      return as(reduce_as<Float16, float, Float16>);
    case kFloat32:
      return as(reduce_as<float, float, Plain<float>>);
    case kFloat64:
      return as(reduce_as<double, double, Plain<double>>);
    case kBfloat16:
      return as(reduce_as<Bfloat16, float, Bfloat16>);
    default:
      return false;
  }
}

double scalar(int datatype, const void* from) {
  const auto as = [from](auto value) {
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  switch (datatype) {
    case kFloat16:
      return Float16::load(as(Float16{}));
    case kFloat32:
      return as(float{});
    case kFloat64:
      return as(double{});
    case kBfloat16:
      return Bfloat16::load(as(Bfloat16{}));
    case kInt64:
      return static_cast<double>(as(int64_t{}));
    default:
      return as(int32_t{});
  }
}
