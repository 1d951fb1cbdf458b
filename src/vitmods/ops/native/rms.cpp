// Root mean square normalization of rows. Every row of `channels` numbers has `groups` parts of equal width:
//   r = 1 / sqrt(mean of x^2 over the part + eps),  z = x r,  y = gain z + shift.
// Vectors of one number a channel may be null: gain is then 1, shift and pull are 0.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t BLOCK = 64;       // rows that are summed in float32 before they go to a float64 total
constexpr int64_t SMALL = 1 << 15;  // numbers below which one thread is faster

float reciprocal_rms(const float* x, int64_t width, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) sum += x[c] * x[c];
    return 1 / std::sqrt(sum / static_cast<float>(width) + eps);
}

// Sums over blocks of rows, [blocks][channels] -> the total of each channel, the same for any number of threads.
void add_up(const std::vector<float>& blocks, int64_t channels, float* out) {
    std::vector<double> total(channels, 0);
    for (size_t at = 0; at < blocks.size(); at += channels)
        for (int64_t c = 0; c < channels; ++c) total[c] += blocks[at + c];
    std::copy(total.begin(), total.end(), out);
}

int64_t blocks_of(int64_t rows) { return (rows + BLOCK - 1) / BLOCK; }

std::vector<float> or_else(const float* given, int64_t channels, float otherwise) {
    return given ? std::vector<float>(given, given + channels) : std::vector<float>(channels, otherwise);
}

}  // namespace

extern "C" {

void rms_forward(const float* x, const float* gain, const float* shift, int64_t rows, int64_t channels,
                 int64_t groups, float eps, float* y, float* r) {
    const int64_t width = channels / groups;
    const std::vector<float> gains = or_else(gain, channels, 1), shifts = or_else(shift, channels, 0);
#pragma omp parallel for if (rows * channels > SMALL)
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t g = 0; g < groups; ++g) {
            const float* in = x + row * channels + g * width;
            const float *w = &gains[g * width], *b = &shifts[g * width];
            float* out = y + row * channels + g * width;
            const float inverse = r[row * groups + g] = reciprocal_rms(in, width, eps);
#pragma omp simd
            for (int64_t c = 0; c < width; ++c) out[c] = in[c] * inverse * w[c] + b[c];
        }
    }
}

// The mean of z^2 over rows, for each channel.
void rms_quadratic_means(const float* x, int64_t rows, int64_t channels, int64_t groups, float eps, float* means) {
    const int64_t width = channels / groups, blocks = blocks_of(rows);
    std::vector<float> sums(blocks * channels, 0);
#pragma omp parallel for if (rows * channels > SMALL)
    for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); ++row) {
            for (int64_t g = 0; g < groups; ++g) {
                const float* in = x + row * channels + g * width;
                float* sum = &sums[block * channels + g * width];
                const float inverse = reciprocal_rms(in, width, eps);
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) sum[c] += (in[c] * inverse) * (in[c] * inverse);
            }
        }
    }
    add_up(sums, channels, means);
    for (int64_t c = 0; c < channels; ++c) means[c] /= static_cast<float>(rows);
}

// With a = gain grad - pull z:  dx = r (a - z mean of a z over the part).  Also the sums over rows of grad z and,
// unless sum_grad is null, of grad.
void rms_backward(const float* grad, const float* x, const float* gain, const float* pull, const float* r,
                  int64_t rows, int64_t channels, int64_t groups, float* dx, float* sum_grad_z, float* sum_grad) {
    const int64_t width = channels / groups, blocks = blocks_of(rows);
    const std::vector<float> gains = or_else(gain, channels, 1), pulls = or_else(pull, channels, 0);
    std::vector<float> with_z(blocks * channels, 0), alone(sum_grad ? blocks * channels : 0, 0);
#pragma omp parallel for if (rows * channels > SMALL)
    for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); ++row) {
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t at = row * channels + g * width;
                const float *d = grad + at, *in = x + at, *w = &gains[g * width], *p = &pulls[g * width];
                const float inverse = r[row * groups + g];
                float along = 0;
#pragma omp simd reduction(+ : along)
                for (int64_t c = 0; c < width; ++c) along += (d[c] * w[c] - p[c] * in[c] * inverse) * in[c];
                along *= inverse / static_cast<float>(width);
                float *out = dx + at, *sz = &with_z[block * channels + g * width];
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) {
                    const float z = in[c] * inverse;
                    out[c] = inverse * (d[c] * w[c] - (p[c] + along) * z);
                    sz[c] += d[c] * z;
                }
                if (!sum_grad) continue;
                float* s = &alone[block * channels + g * width];
#pragma omp simd
                for (int64_t c = 0; c < width; ++c) s[c] += d[c];
            }
        }
    }
    add_up(with_z, channels, sum_grad_z);
    if (sum_grad) add_up(alone, channels, sum_grad);
}
}
