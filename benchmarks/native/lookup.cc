// What NCCL waits for when it asks the tuner: nanoseconds a call, with the table that
// COMMKIT_TUNER_TABLE names.
//
//   calls= ranks= nodes=
//
// Sizes up to 1 T are drawn beforehand, more than a processor remembers the branches of.  Prints
// one JSON line.
#include <random>

#include "rig.h"
#include "tuner/abi.h"

extern "C" const tuner_v6 ncclTunerPlugin_v6;

int main(int argc, char** argv) {
  rig::Arguments arguments(argc, argv);
  int calls = arguments.whole("calls", 1000000);
  void* context = nullptr;
  const tuner_v6& plugin = ncclTunerPlugin_v6;
  plugin.init(&context, 1, static_cast<size_t>(arguments.whole("ranks", 64)),
              static_cast<size_t>(arguments.whole("nodes", 8)), nullptr, nullptr, nullptr);
  std::mt19937_64 generator(1);
  std::vector<size_t> sizes(1 << 18);
  for (auto& size : sizes) size = generator() >> 24;
  float costs[kAlgorithms][kProtocols];
  int channels = 0;
  long chosen = 0;
  double start = commkit::now();
  for (int i = 0; i < calls; ++i) {
    costs[kRing][kSimple] = 1;
    plugin.info(context, kAllReduce, sizes[static_cast<size_t>(i) % sizes.size()], 1,
                reinterpret_cast<float**>(costs), kAlgorithms, kProtocols, 0, &channels);
    chosen += costs[kRing][kSimple] == 0;
  }
  double seconds = commkit::now() - start;
  plugin.finalize(context);
  std::printf("{\"nanoseconds\": %.1f, \"chosen\": %ld, \"calls\": %d}\n", seconds / calls * 1e9,
              chosen, calls);
}
