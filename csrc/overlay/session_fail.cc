// A join's deadline, what is told while it lasts, and how a session fails.
#include <algorithm>

#include "overlay/agent.h"
#include "overlay/session.h"

namespace commkit {

namespace {

constexpr double kRootAnswerSeconds = 2.0;
constexpr double kFarewellSeconds = 3.0;

}  // namespace

// The first deadline of any local rank is everybody's.
void Session::arm_deadline(double deadline) {
  if (deadline_timer_ != 0 && deadline >= first_deadline_) return;
  loop_.cancel(deadline_timer_);
  first_deadline_ = deadline;
  deadline_timer_ = loop_.after(std::max(0.0, deadline - now()), [this] { deadline_passed(); });
}

void Session::deadline_passed() {
  if (state_ != State::kJoining) return;
  flush_reports();
  if (state_ != State::kJoining) return;
  if (root_) return fail_join("join-timeout", "");
  std::string here = local_ranks().named() + " on host " + config_.host_name;
  auto up = uplink();
  if (!up) {
    std::string why = contact_ ? contact_->status() : "the root has not answered";
    if (!root_said_.empty()) why += "; it had said: " + root_said_;
    return fail("join-timeout", "the deadline passed while " + here + " waited: " + why);
  }
  deadline_said_ = true;
  Writer w;
  w.str("join-timeout").str("");
  up->send_frame(kFailUp, w.take());
  deadline_timer_ = loop_.after(kRootAnswerSeconds, [this, here] {
    if (state_ != State::kJoining) return;
    fail("join-timeout", "the deadline passed while " + here + " waited, and the root (" +
                             (parent_ ? "through host " + parent_->host : config_.root_host) +
                             ") did not say within " +
                             std::to_string(static_cast<int>(kRootAnswerSeconds)) +
                             " s who is missing");
  });
}

void Session::arm_progress(double seconds) {
  loop_.cancel(progress_timer_);
  progress_timer_ = loop_.after(std::max(0.2, seconds), [this, seconds] {
    progress();
    arm_progress(std::min(60.0, std::max(1.0, seconds * 2)));
  });
}

void Session::progress() {
  if (state_ != State::kJoining) return;
  if (!root_) {
    if (parent_ || root_stream_) return;  // the root speaks for us
    return notice("progress", "host " + config_.host_name + ", " + local_ranks().named() + ": " +
                                  (contact_ ? contact_->status() : ""));
  }
  std::string text = "joining: " + missing_text();
  log(text);
  Writer w;
  w.str(text);
  std::string payload = w.take();
  to_children(kProgress, payload);
  for (auto& host : root_->hosts) {
    if (host.contact) host.contact->send_frame(kProgress, payload);
  }
  notice("progress", text);
}

void Session::notice(const std::string& kind, const std::string& text) {
  if (kind != "progress") log(text);
  Writer w;
  w.str(kind).str(text);
  std::string payload = w.take();
  for (auto& [rank, conn] : ranks_) {
    if (!conn->gone()) conn->stream->send_frame(kNotice, payload);
  }
}

void Session::to_children(uint16_t type, const std::string& payload) {
  for (auto& [index, link] : children_) {
    // A child that was adopted after its end has none.
    if (link->stream) link->stream->send_frame(type, payload);
  }
}

void Session::fail_join(const std::string& kind, const std::string& text) {
  if (state_ != State::kJoining) return;
  if (!root_) {
    auto up = uplink();
    Writer w;
    w.str(kind).str(text);
    if (up) up->send_frame(kFailUp, w.take());
    return fail(kind, text);
  }
  std::string whole = text.empty() ? missing_text() : text;
  if (kind == "join-timeout") whole = "the deadline passed: " + whole;
  Writer w;
  w.str(kind).str(whole);
  std::string payload = w.take();
  for (auto& host : root_->hosts) {
    if (!host.contact) continue;
    host.contact->on_close(nullptr);
    host.contact->send_frame(kFailDown, payload);
  }
  fail(kind, whole);
}

void Session::fail(const std::string& kind, const std::string& text) {
  if (state_ == State::kFailed) return;
  bool joining = state_ == State::kJoining;
  state_ = State::kFailed;
  release_leaves();
  log("failed (" + kind + "): " + text);
  losses_.push_back(text);
  Writer w;
  w.str(kind).str(text);
  std::string payload = w.take();
  to_children(kFailDown, payload);
  for (auto& [index, link] : adopted_) link->stream->send_frame(kFailDown, payload);
  std::set<std::string> told;
  for (auto& [rank, conn] : ranks_) extras_.push_back(conn);
  for (auto& conn : extras_) {
    if (!conn->gone()) conn->stream->send_frame(kFailed, payload);
    conn->left = true;
    told.insert("pid " + std::to_string(conn->pid));
  }
  for (auto id : {deadline_timer_, progress_timer_, report_timer_, end_timer_, bind_timer_,
                  root_back_timer_, handover_timer_})
    loop_.cancel(id);
  if (contact_ && kind == "join") {
    // The others wait for our ranks: the root must hear that they will not come.
    farewell_ = payload;
    end_timer_ = loop_.after(kFarewellSeconds, [this] { over(); });
  } else if (contact_) {
    loop_.defer([contact = std::move(contact_)] { contact->stop(); });
    contact_.reset();
  }
  if (root_stream_) root_stream_->close_when_sent();
  root_stream_.reset();
  if (root_) {
    for (const auto& [agent, index] : root_->index_of) told.insert(agent);
  }
  if (joining) agent_.join_failed(kind, text, std::move(told));
  fail_ops(kind, text);
  fail_calls(text);
  check_over();
}

}  // namespace commkit
