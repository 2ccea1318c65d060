// How an agent finds the root and gets its attention: tries again, with back-off, until stopped.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "overlay/config.h"
#include "overlay/hello.h"

namespace commkit {

// What a root publishes where others can read it: a port and numeric addresses, and the machine
// inside which its loopback addresses are good.
std::string root_text(uint16_t port, const std::vector<std::string>& addresses,
                      const std::string& machine);
std::vector<SocketAddress> parse_root_text(const std::string& text, const std::string& own_machine);
// The key of torchrun's store, and the first word of a rendezvous file.
std::string root_store_key(const Config& config);

class Contact : public std::enable_shared_from_this<Contact> {
 public:
  struct Outcome {
    std::function<void(StreamPtr)> held;               // the root answered and will say more
    std::function<void(const std::string&)> hopeless;  // no use in trying again
  };
  static std::shared_ptr<Contact> start(Loop& loop, Config config, Hello hello, Dialer::Terms terms,
                                        Outcome outcome);
  ~Contact();
  void stop();
  // One more rank has come: the age of the oldest tells to which attempt they belong.
  void born(double at) { hello_.born = std::min(hello_.born, at); }
  // What is known so far, for progress and for the error at the deadline.
  std::string status() const;

 private:
  explicit Contact(Loop& loop) : loop_(loop) {}
  void attempt();
  void again(const std::string& why);
  void look_up_name();
  void read_file();
  void ask_store(const SocketAddress& at, bool others);
  void dial(std::vector<SocketAddress> to);

  Loop& loop_;
  Config config_;
  Hello hello_;
  Dialer::Terms terms_;
  Outcome outcome_;
  double started_ = 0;
  double backoff_ = 0.02;
  double asked_name_at_ = 0;  // 0: no look-up is under way
  int tries_ = 0;
  size_t store_tries_ = 0;
  std::string last_error_;
  std::shared_ptr<Dialer> dialer_;
  StreamPtr store_;
  std::string store_in_;
  bool store_turn_ = true;  // elastic: torchrun's store and our own protocol, in turns
  bool alive_ = false;      // the store has answered our PING
  bool asked_value_ = false;
  Loop::TimerId timer_ = 0;
  bool stopped_ = false;
};

// Root side of the elastic kind: sets the key in torchrun's store.  `done` gets "" or what went
// wrong.
void publish_in_store(Loop& loop, const std::vector<SocketAddress>& store, const std::string& key,
                      const std::string& value, std::function<void(std::string)> done);

}  // namespace commkit
