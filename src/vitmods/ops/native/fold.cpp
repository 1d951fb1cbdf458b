// The gain and shift of a norm multiplied into the linear map behind it, weight [out][in]:
//   folded = weight * gain (by columns),  offset = weight shift + bias,  and the gradients of both.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t TILE = 64;        // columns at a time, whose sums stay in registers
constexpr int64_t SMALL = 1 << 15;  // numbers below which one thread is faster

}  // namespace

extern "C" {

// bias may be null.
void fold(const float* weight, const float* bias, const float* gain, const float* shift, int64_t out, int64_t in,
          float* folded, float* offset) {
#pragma omp parallel for if (out * in > SMALL)
    for (int64_t o = 0; o < out; ++o) {
        const float* w = weight + o * in;
        float* f = folded + o * in;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < in; ++i) {
            f[i] = w[i] * gain[i];
            sum += w[i] * shift[i];
        }
        offset[o] = sum + (bias ? bias[o] : 0);
    }
}

// From the gradients of folded and offset those of weight, gain and shift; bias has that of offset.
void fold_backward(const float* grad_folded, const float* grad_offset, const float* weight, const float* gain,
                   const float* shift, int64_t out, int64_t in, float* grad_weight, float* grad_gain,
                   float* grad_shift) {
#pragma omp parallel for if (out * in > SMALL)
    for (int64_t first = 0; first < in; first += TILE) {
        const int64_t n = std::min(TILE, in - first);
        const float *g = gain + first, *s = shift + first;
        float sum_gain[TILE] = {}, sum_shift[TILE] = {};
        for (int64_t o = 0; o < out; ++o) {
            const float *d = grad_folded + o * in + first, *w = weight + o * in + first;
            float* to = grad_weight + o * in + first;
            const float b = grad_offset[o];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                sum_gain[i] += d[i] * w[i];
                sum_shift[i] += b * w[i];
                to[i] = d[i] * g[i] + b * s[i];
            }
        }
        std::copy(sum_gain, sum_gain + n, grad_gain + first);
        std::copy(sum_shift, sum_shift + n, grad_shift + first);
    }
}
}
