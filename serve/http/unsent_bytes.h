// The bytes that wait to be sent over a connection, in pieces: a long one is moved here, and freed
// when it is sent.
#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

namespace ferry::serve {

class UnsentBytes {
 public:
  bool empty() const { return size_ == 0; }
  std::size_t size() const { return size_; }

  void add(std::string bytes) {
    size_ += bytes.size();
    if (!pieces_.empty() && pieces_.back().size() + bytes.size() <= kJoined)
      pieces_.back() += bytes;
    else if (!bytes.empty())
      pieces_.push_back(std::move(bytes));
  }
  // The first of them, some where there are any.
  std::string_view first() const {
    return pieces_.empty() ? std::string_view() : std::string_view(pieces_.front()).substr(sent_);
  }
  // Takes so many of first() away.
  void remove(std::size_t count) {
    size_ -= count;
    sent_ += count;
    if (sent_ < pieces_.front().size()) return;
    pieces_.pop_front();
    sent_ = 0;
  }

 private:
  static constexpr std::size_t kJoined = std::size_t{64} << 10;  // bytes of a piece of short ones

  std::deque<std::string> pieces_;
  std::size_t size_ = 0;
  std::size_t sent_ = 0;  // of the first piece
};

}  // namespace ferry::serve
