#include "rollout/vision/image_file.h"

#include <ATen/ops/empty.h>
#include <png.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <vector>

#include "distckpt/base/error.h"

// It needs <cstdio> before it, and what names its errors needs it.
#include <jerror.h>
#include <jpeglib.h>

namespace ferry::rollout {
namespace {

constexpr std::int64_t kChannels = 3;
// Cameras and encoders write ten or so. A scan of a few bytes costs a walk over all of the image.
constexpr int kMostScans = 100;

// Rows of an image, to be written one after another.
struct Canvas {
  at::Tensor pixels{};  // [height, width, 3]
  std::vector<unsigned char*> rows{};
};

Canvas make_canvas(std::int64_t height,
                   std::int64_t width,
                   const std::string& source,
                   std::int64_t most_pixels) {
  require(height > 0 && width > 0 && height * width <= most_pixels, ErrorKind::kUsage,
          "{}: has {} x {} pixels, expected 1 to {} in all", source, height, width, most_pixels);
  Canvas canvas{.pixels = at::empty({height, width, kChannels}, at::kByte)};
  auto* at = canvas.pixels.mutable_data_ptr<unsigned char>();
  for (std::int64_t row = 0; row < height; ++row, at += width * kChannels)
    canvas.rows.push_back(at);
  return canvas;
}

constexpr std::size_t kInks = 4;

// A row in three colours, in the integers of torchvision's decode_jpeg.cpp: inks are taken to be
// inverted, as Adobe's programs and Pillow write them.
void cmyk_to_rgb(std::span<const unsigned char> inks, unsigned char* rgb) {
  for (std::size_t at = 0; at < inks.size(); at += kInks) {
    const int light = inks[at + 3];
    for (std::size_t ink = 0; ink < 3; ++ink) {
      const int product = light * (255 - inks[at + ink]) + 128;
      *rgb++ =
          static_cast<unsigned char>(std::clamp(light - (((product >> 8) + product) >> 8), 0, 255));
    }
  }
}

// Both libraries report errors by a jump: the functions that may be jumped back into have nothing
// to destroy.
class Jpeg {
 public:
  explicit Jpeg(std::span<const std::byte> bytes) {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = [](j_common_ptr info) {
      auto& errors = *reinterpret_cast<Errors*>(info->err);
      info->err->format_message(info, errors.message.data());
      std::longjmp(errors.back, 1);  // NOLINT(cert-err52-cpp): libjpeg's way
    };
    errors_.base.output_message = [](j_common_ptr) {};
    jpeg_create_decompress(&info_);
    progress_.progress_monitor = [](j_common_ptr info) {
      if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMostScans) return;
      auto& errors = *reinterpret_cast<Errors*>(info->err);
      std::snprintf(errors.message.data(), errors.message.size(), "has more than %d scans",
                    kMostScans);
      std::longjmp(errors.back, 1);  // NOLINT(cert-err52-cpp): libjpeg's way
    };
    info_.progress = &progress_;
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
    // libjpeg's own would make up an end of the image.
    info_.src->fill_input_buffer = [](j_decompress_ptr info) -> boolean {
      ERREXIT(info, JERR_INPUT_EOF);
      return FALSE;
    };
  }
  ~Jpeg() { jpeg_destroy_decompress(&info_); }
  Jpeg(const Jpeg&) = delete;
  Jpeg& operator=(const Jpeg&) = delete;

  bool begin() {
    if (setjmp(errors_.back) != 0) return false;  // NOLINT(cert-err52-cpp)
    jpeg_read_header(&info_, TRUE);
    info_.out_color_space = is_cmyk() ? JCS_CMYK : JCS_RGB;
    jpeg_calc_output_dimensions(&info_);
    return true;
  }
  // `line`: has room for a row in CMYK, if the image is.
  bool read(std::span<unsigned char*> rows, std::span<unsigned char> line) {
    if (setjmp(errors_.back) != 0) return false;  // NOLINT(cert-err52-cpp)
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      auto* const row = rows[info_.output_scanline];
      auto* into = is_cmyk() ? line.data() : row;
      jpeg_read_scanlines(&info_, &into, 1);
      if (is_cmyk()) cmyk_to_rgb(line, row);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }
  bool is_cmyk() const {
    return info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
  }
  std::int64_t height() const { return info_.output_height; }
  std::int64_t width() const { return info_.output_width; }
  const char* message() const { return errors_.message.data(); }

 private:
  struct Errors {
    jpeg_error_mgr base{};
    std::jmp_buf back{};
    std::array<char, JMSG_LENGTH_MAX> message{};
  };
  Errors errors_{};
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct info_{};
};

at::Tensor decode_jpeg(std::span<const std::byte> bytes,
                       const std::string& source,
                       std::int64_t most_pixels) {
  Jpeg jpeg(bytes);
  require(jpeg.begin(), ErrorKind::kCorrupt, "{}: {}", source, jpeg.message());
  auto canvas = make_canvas(jpeg.height(), jpeg.width(), source, most_pixels);
  std::vector<unsigned char> line(jpeg.is_cmyk() ? kInks * static_cast<std::size_t>(jpeg.width())
                                                 : 0);
  require(jpeg.read(canvas.rows, line), ErrorKind::kCorrupt, "{}: {}", source, jpeg.message());
  return canvas.pixels;
}

class Png {
 public:
  explicit Png(std::span<const std::byte> bytes) : rest_(bytes) {
    png_ = png_create_read_struct(
        PNG_LIBPNG_VER_STRING, this,
        [](png_structp png, png_const_charp message) {
          auto& self = *static_cast<Png*>(png_get_error_ptr(png));
          std::snprintf(self.message_.data(), self.message_.size(), "%s", message);
          std::longjmp(png_jmpbuf(png), 1);  // NOLINT(cert-err52-cpp): libpng's way
        },
        [](png_structp, png_const_charp) {});
    require(png_ != nullptr, ErrorKind::kBug, "libpng {} is not the one that this was built with",
            png_get_libpng_ver(nullptr));
    // Texts may be gigabytes that a file of megabytes unpacks to; nothing here is of use.
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
    info_ = png_create_info_struct(png_);
    require(info_ != nullptr, ErrorKind::kBug, "libpng has no memory");
    png_set_read_fn(png_, this, [](png_structp png, png_bytep to, std::size_t size) {
      auto& self = *static_cast<Png*>(png_get_io_ptr(png));
      if (size > self.rest_.size()) png_error(png, "the file ends too early");
      std::memcpy(to, self.rest_.data(), size);
      self.rest_ = self.rest_.subspan(size);
    });
  }
  ~Png() { png_destroy_read_struct(&png_, &info_, nullptr); }
  Png(const Png&) = delete;
  Png& operator=(const Png&) = delete;

  bool begin() {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_read_info(png_, info_);
    const auto color = png_get_color_type(png_, info_);
    if (color == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png_);
    if (color == PNG_COLOR_TYPE_GRAY && png_get_bit_depth(png_, info_) < 8)
      png_set_expand_gray_1_2_4_to_8(png_);
    if ((color & PNG_COLOR_MASK_COLOR) == 0) png_set_gray_to_rgb(png_);
    // A palette's transparency becomes a channel of its own, too.
    if ((color & PNG_COLOR_MASK_ALPHA) != 0 || color == PNG_COLOR_TYPE_PALETTE)
      png_set_strip_alpha(png_);
    png_set_interlace_handling(png_);
    return true;
  }
  bool read(std::span<unsigned char*> rows) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;  // NOLINT(cert-err52-cpp)
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != 3 * std::size_t{png_get_image_width(png_, info_)})
      png_error(png_, "its rows are not RGB");
    png_read_image(png_, rows.data());
    png_read_end(png_, nullptr);
    return true;
  }
  int bit_depth() const { return png_get_bit_depth(png_, info_); }
  std::int64_t height() const { return png_get_image_height(png_, info_); }
  std::int64_t width() const { return png_get_image_width(png_, info_); }
  const char* message() const { return message_.data(); }

 private:
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::span<const std::byte> rest_;
  std::array<char, 200> message_{};
};

at::Tensor decode_png(std::span<const std::byte> bytes,
                      const std::string& source,
                      std::int64_t most_pixels) {
  Png png(bytes);
  require(png.begin(), ErrorKind::kCorrupt, "{}: {}", source, png.message());
  require(png.bit_depth() <= 8, ErrorKind::kUsage,
          "{}: is a PNG of {} bits a channel, of which 1 to 8 are decoded: transformers would take "
          "its values for those of 8 bits",
          source, png.bit_depth());
  auto canvas = make_canvas(png.height(), png.width(), source, most_pixels);
  require(png.read(canvas.rows), ErrorKind::kCorrupt, "{}: {}", source, png.message());
  return canvas.pixels;
}

bool begins_with(std::span<const std::byte> bytes, std::initializer_list<int> magic) {
  return bytes.size() >= magic.size() &&
         std::equal(magic.begin(), magic.end(), bytes.begin(),
                    [](int a, std::byte b) { return std::byte(a) == b; });
}

}  // namespace

at::Tensor decode_image(std::span<const std::byte> bytes,
                        const std::string& source,
                        std::int64_t most_pixels) {
  at::Tensor pixels;
  if (begins_with(bytes, {0xff, 0xd8, 0xff})) {
    pixels = decode_jpeg(bytes, source, most_pixels);
  } else if (begins_with(bytes, {0x89, 'P', 'N', 'G'})) {
    pixels = decode_png(bytes, source, most_pixels);
  } else {
    fail(ErrorKind::kUsage, "{}: is neither JPEG nor PNG", source);
  }
  return pixels.permute({2, 0, 1});
}

}  // namespace ferry::rollout
