// Cut images into patches and normalize each patch over its values, in one pass over the images:
//   [batch][channels][height][width] -> [batch][patches][channels * rows * columns],
//   (x - mean) / sqrt(var + eps) * gain + shift  with the biased variance; gain and shift are one number a value.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t SMALL = 1 << 15;  // numbers below which one thread is faster

void normalize(float* patch, const float* gain, const float* shift, int64_t values, float eps) {
    const float share = 1 / static_cast<float>(values);
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < values; ++i) sum += patch[i];
    const float mean = sum * share;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < values; ++i) squares += (patch[i] - mean) * (patch[i] - mean);
    const float inverse = 1 / std::sqrt(squares * share + eps);
#pragma omp simd
    for (int64_t i = 0; i < values; ++i) patch[i] = (patch[i] - mean) * inverse * gain[i] + shift[i];
}

// A line of pixels goes to all patches of a row; that row of patches stays in the cache until it is normalized.
template <int64_t COLUMNS>
void cut_line(const float* line, int64_t across, int64_t columns, int64_t values, float* first) {
    const int64_t n = COLUMNS ? COLUMNS : columns;
    for (int64_t j = 0; j < across; ++j) std::memcpy(first + j * values, line + j * n, n * sizeof(float));
}

}  // namespace

extern "C" void patch_norm(const float* images, const float* gain, const float* shift, int64_t batch,
                           int64_t channels, int64_t height, int64_t width, int64_t rows, int64_t columns, float eps,
                           float* patches) {
    const int64_t down = height / rows, across = width / columns, values = channels * rows * columns;
#pragma omp parallel for collapse(2) if (batch * channels * height * width > SMALL)
    for (int64_t image = 0; image < batch; ++image) {
        for (int64_t i = 0; i < down; ++i) {
            float* const row = patches + (image * down + i) * across * values;
            for (int64_t c = 0; c < channels; ++c) {
                for (int64_t r = 0; r < rows; ++r) {
                    const float* line = images + ((image * channels + c) * height + i * rows + r) * width;
                    float* first = row + (c * rows + r) * columns;
                    columns == 16 ? cut_line<16>(line, across, columns, values, first)
                                  : cut_line<0>(line, across, columns, values, first);
                }
            }
            for (int64_t j = 0; j < across; ++j) normalize(row + j * values, gain, shift, values, eps);
        }
    }
}
