// A transport between threads, which stands for the network in multi-host tests.
#pragma once

#include "messages.h"
#include "transport.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <list>
#include <mutex>
#include <set>
#include <stdexcept>
#include <vector>

namespace weft::collectives::testing {

// All messages in flight between the ranks of a group.
class Mailboxes {
 public:
  struct Envelope {
    int from;
    int to;
    int tag;
    std::vector<std::byte> data;
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::list<Envelope> envelopes;
  std::set<int> closed;  // ranks that send no more
};

class MailboxTransport final : public Transport {
 public:
  MailboxTransport(Mailboxes& mailboxes, int rank) : mailboxes_(mailboxes), rank_(rank) {}
  ~MailboxTransport() override {
    const std::lock_guard lock(mailboxes_.mutex);
    mailboxes_.closed.insert(rank_);
    mailboxes_.changed.notify_all();
  }

  std::unique_ptr<Transfer> send(int peer,
                                 int tag,
                                 const std::byte* data,
                                 size_t num_bytes) override {
    const std::lock_guard lock(mailboxes_.mutex);
    mailboxes_.envelopes.push_back({rank_, peer, tag, {data, data + num_bytes}});
    mailboxes_.changed.notify_all();
    return std::make_unique<Sent>();
  }

  std::unique_ptr<Transfer> receive(int peer, int tag, std::byte* data, size_t num_bytes) override {
    return std::make_unique<Received>(mailboxes_, Posted{peer, rank_, tag, data, num_bytes});
  }

 private:
  // A receive that waits for its message.
  struct Posted {
    int from;
    int to;
    int tag;
    std::byte* data;
    size_t num_bytes;
  };

  class Sent final : public Transfer {
   public:
    void wait(std::chrono::milliseconds /*timeout*/) override {}
    void give_up() override {}
    int source() const override { return -1; }
  };

  // NOTE: A receive is matched with a message in wait(), so tests must wait for the receives of one
  // tag in the order of posting.
  class Received final : public Transfer {
   public:
    Received(Mailboxes& mailboxes, const Posted& posted) : mailboxes_(mailboxes), posted_(posted) {}

    void wait(std::chrono::milliseconds timeout) override {
      std::unique_lock lock(mailboxes_.mutex);
      auto found = mailboxes_.envelopes.end();
      const bool is_ready = mailboxes_.changed.wait_for(lock, timeout, [&] {
        found =
            std::ranges::find_if(mailboxes_.envelopes, [&](const Mailboxes::Envelope& envelope) {
              return envelope.to == posted_.to && envelope.tag == posted_.tag &&
                     (posted_.from == kAnySource || posted_.from == envelope.from);
            });
        return is_given_up_ || found != mailboxes_.envelopes.end() ||
               mailboxes_.closed.contains(posted_.from);
      });
      if (!is_ready || is_given_up_ || found == mailboxes_.envelopes.end()) {
        throw std::runtime_error("no message arrived for a receive");
      }
      if (found->data.size() != posted_.num_bytes)
        throw std::runtime_error("a message has another size than its receive");
      std::ranges::copy(found->data, posted_.data);
      source_ = found->from;
      mailboxes_.envelopes.erase(found);
    }
    void give_up() override {
      const std::lock_guard lock(mailboxes_.mutex);
      is_given_up_ = true;
      mailboxes_.changed.notify_all();
    }
    int source() const override { return source_; }

   private:
    Mailboxes& mailboxes_;
    const Posted posted_;
    bool is_given_up_ = false;
    int source_ = kAnySource;
  };

  Mailboxes& mailboxes_;
  const int rank_;
};

}  // namespace weft::collectives::testing
