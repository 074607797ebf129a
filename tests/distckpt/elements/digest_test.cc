#include "distckpt/elements/digest.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace digest_test {

// 0, 1, 2, ... modulo 251: bytes that no two blocks share.
std::vector<std::byte> count_up(std::int64_t size) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

std::vector<Digest> blocks_of(std::span<const std::byte> bytes) {
  std::vector<Digest> blocks;
  for (std::size_t at = 0; at < bytes.size(); at += kDigestBlock) {
    const auto size = std::min<std::size_t>(kDigestBlock, bytes.size() - at);
    blocks.push_back(digest_block(bytes.subspan(at, size)));
  }
  return blocks;
}

TEST(Digest, OfBlocksIsXxh3Of128BitsInCanonicalOrder) {
  // The values of the XXH3 specification's own test vectors for no bytes, and `xxh128sum`.
  EXPECT_EQ(to_string(digest_block({})), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(to_string(digest_block(as_bytes("ferry"))), "85ca3a0dfcfe59849331f43fcdbd2eb8");
  EXPECT_EQ(to_string(digest_block(count_up(kDigestBlock))), "53738d98098cabba6e0d7ac36b8c10ff");
}

TEST(Digest, OfTensorsIsPinned) {
  const auto bytes = count_up(24);
  EXPECT_EQ(to_string(digest_tensor(DType::kBF16, {3, 4}, blocks_of(bytes))),
            "1567a7854f2c25a4780d98cd16926af5");
  EXPECT_EQ(to_string(digest_tensor(DType::kF32, {}, blocks_of(count_up(4)))),
            "1fbb74d3691736ec2672f77b5c898df4");
  EXPECT_EQ(to_string(digest_tensor(DType::kF32, {0, 8}, {})), "c78779ce77ef72a317fb2c3489d7674f");
  const auto long_bytes = count_up(2 * kDigestBlock + 6);
  EXPECT_EQ(to_string(digest_tensor(DType::kBF16, {kDigestBlock + 3}, blocks_of(long_bytes))),
            "d586a1eb77985ef5c3608c54768c2285");
}

TEST(Digest, OfModelsIsPinned) {
  const auto a = digest_tensor(DType::kBF16, {3, 4}, blocks_of(count_up(24)));
  const auto b = digest_tensor(DType::kF32, {}, blocks_of(count_up(4)));
  EXPECT_EQ(to_string(digest_model({{"b", b}, {"a", a}})), "7c345c73c574a0b0ee5ed4dbe335cb11");
}

TEST(Digest, OfModelsKnowsNoOrder) {
  support::Random random(1);
  std::vector<NamedDigest> tensors;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back({"layer." + std::to_string(i), digest_block(random.bytes(40))});
  }
  const auto expected = digest_model(tensors);
  random.shuffle(tensors);
  EXPECT_EQ(digest_model(tensors), expected);
  std::swap(tensors[3].digest, tensors[4].digest);
  EXPECT_NE(digest_model(tensors), expected);
}

TEST(Digest, OfTensorsKnowsDTypeAndShape) {
  const auto blocks = blocks_of(count_up(24));
  const auto one = digest_tensor(DType::kBF16, {3, 4}, blocks);
  EXPECT_NE(one, digest_tensor(DType::kF16, {3, 4}, blocks));
  EXPECT_NE(one, digest_tensor(DType::kBF16, {4, 3}, blocks));
  EXPECT_NE(one, digest_tensor(DType::kBF16, {12}, blocks));
  EXPECT_NE(one, digest_tensor(DType::kBF16, {1, 3, 4}, blocks));
}

TEST(Digest, EachBlockDependsOnItsOwnBytesAlone) {
  auto bytes = count_up(3 * kDigestBlock);
  const auto before = blocks_of(bytes);
  bytes[kDigestBlock + 17] ^= std::byte{1};
  const auto after = blocks_of(bytes);
  EXPECT_EQ(before[0], after[0]);
  EXPECT_NE(before[1], after[1]);
  EXPECT_EQ(before[2], after[2]);
  EXPECT_NE(digest_tensor(DType::kU8, {3 * kDigestBlock}, before),
            digest_tensor(DType::kU8, {3 * kDigestBlock}, after));
}

TEST(Digest, TextThereAndBackIsTheSame) {
  support::Random random(2);
  for (int i = 0; i < 100; ++i) {
    const auto digest = digest_block(random.bytes(i));
    const auto text = to_string(digest);
    EXPECT_EQ(text.size(), 32U);
    EXPECT_EQ(digest_from_string(text), digest);
  }
}

TEST(Digest, RefusesTextThatIsNone) {
  for (const char* text :
       {"", "99aa", "99aa06d3014798d86001c324468d49", "x9aa06d3014798d86001c324468d497f",
        "99aa06d3014798d86001c324468d497f0", "99aa06d3014798d86001c324468d49-1",
        "99aa06d3014798d86001c324468d49 f"}) {
    EXPECT_FALSE(digest_from_string(text)) << text;
  }
}

TEST(RunningDigest, IsThatOfAllPieces) {
  const std::string text(3'000'000, 'x');
  for (const std::size_t piece : {1000U, 1'048'576U, 3'000'000U}) {
    RunningDigest running;
    for (std::size_t at = 0; at < text.size(); at += piece)
      running.add(as_bytes(std::string_view(text).substr(at, piece)));
    EXPECT_EQ(running.digest(), digest_block(as_bytes(text)));
  }
}

}  // namespace digest_test
}  // namespace ferry::distckpt
