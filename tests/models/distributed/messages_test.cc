#include "models/distributed/messages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "models/distributed/world.h"

namespace ferry::models {
namespace messages_test {

struct Greeting {
  std::string from{};
  std::int64_t number = 0;

  bool operator==(const Greeting&) const = default;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Greeting, from, number)

TEST(Messages, TextMayHoldAnyBytes) {
  const std::string text("a\n\0\xff\"", 5);
  EXPECT_EQ(from_cbor<std::string>(to_cbor(text)), text);
}

TEST(Messages, NumbersKeepTheirBits) {
  const auto arrives = [](double value) { return from_cbor<double>(to_cbor(value)); };
  for (const double value : {0.1, 1.0 / 3, 5e-324, 1e300, -3.5}) EXPECT_EQ(arrives(value), value);
  EXPECT_TRUE(std::signbit(arrives(-0.0)));
  EXPECT_TRUE(std::isnan(arrives(std::numeric_limits<double>::quiet_NaN())));
  EXPECT_EQ(arrives(-std::numeric_limits<double>::infinity()),
            -std::numeric_limits<double>::infinity());
  const auto least = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(from_cbor<std::int64_t>(to_cbor(least)), least);
}

TEST(Messages, BytesOfAnotherTypeAreRefused) {
  EXPECT_THROW(from_cbor<std::int64_t>(to_cbor(std::string("1"))), nlohmann::json::exception);
}

TEST(Messages, AreGatheredInTheOrderOfRanks) {
  run_ranks(3, {}, [](World& world) {
    const ProcessGroup group(world, "all", {0, 1, 2});
    const auto all = gather(group, Greeting{"rank", world.rank()});
    EXPECT_EQ(all, (std::vector<Greeting>{{"rank", 0}, {"rank", 1}, {"rank", 2}}));
  });
}

TEST(Messages, AreBroadcastFromOneRank) {
  run_ranks(2, {}, [](World& world) {
    const ProcessGroup group(world, "all", {0, 1});
    const auto mine = std::pair("rank " + std::to_string(world.rank()), world.rank());
    EXPECT_EQ(broadcast(group, mine, 1), std::pair(std::string("rank 1"), 1));
  });
}

TEST(Messages, GoThroughAMailbox) {
  run_ranks(2, {}, [](World& world) {
    const Mailbox mail(world, "letters", {.limit = std::chrono::seconds(30)});
    if (world.rank() == 0) return send(mail, Greeting{"zero", 7}, 1, "the greeting");
    EXPECT_EQ(receive<Greeting>(mail, 0, "the greeting"), (Greeting{"zero", 7}));
  });
}

}  // namespace messages_test
}  // namespace ferry::models
