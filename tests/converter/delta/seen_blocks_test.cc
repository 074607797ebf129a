#include "converter/delta/seen_blocks.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <span>
#include <vector>

namespace ferry::converter {
namespace seen_blocks_test {

using distckpt::Digest;
using distckpt::kDigestBlock;

// A tensor of two blocks and three bytes, the second of two.
class SeenBlocksTest : public testing::Test {
 protected:
  SeenBlocksTest() {
    bytes_.resize(static_cast<std::size_t>(size_));
    for (std::size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<std::byte>(i % 251);
  }
  std::span<const std::byte> part(std::int64_t begin, std::int64_t end) const {
    return std::span(bytes_).subspan(static_cast<std::size_t>(begin),
                                     static_cast<std::size_t>(end - begin));
  }
  Digest expected() const {
    const std::array blocks{distckpt::digest_block(part(0, kDigestBlock)),
                            distckpt::digest_block(part(kDigestBlock, 2 * kDigestBlock)),
                            distckpt::digest_block(part(2 * kDigestBlock, size_))};
    return distckpt::digest_tensor(distckpt::DType::kU8, {size_}, blocks);
  }

  std::int64_t size_ = 2 * kDigestBlock + 3;
  std::vector<std::byte> bytes_;
  SeenBlocks seen_{{{.name = "a", .dtype = distckpt::DType::kU8, .shape = {5}},
                    {.name = "b", .dtype = distckpt::DType::kU8, .shape = {size_}}}};
};

TEST_F(SeenBlocksTest, ATensorInOneStretchIsKnownAtOnce) {
  EXPECT_EQ(seen_.add(1, 0, bytes_), expected());
}

TEST_F(SeenBlocksTest, ATensorIsKnownWithItsLastStretchWhicheverThatIs) {
  EXPECT_FALSE(seen_.add(1, 2 * kDigestBlock, part(2 * kDigestBlock, size_)));
  EXPECT_FALSE(seen_.add(1, 0, part(0, kDigestBlock)));
  EXPECT_EQ(seen_.add(1, kDigestBlock, part(kDigestBlock, 2 * kDigestBlock)), expected());
}

TEST_F(SeenBlocksTest, TensorsAreKnownEachByItself) {
  EXPECT_FALSE(seen_.add(1, 0, part(0, 2 * kDigestBlock)));
  EXPECT_TRUE(seen_.add(0, 0, part(0, 5)));
  EXPECT_EQ(seen_.add(1, 2 * kDigestBlock, part(2 * kDigestBlock, size_)), expected());
}

}  // namespace seen_blocks_test
}  // namespace ferry::converter
