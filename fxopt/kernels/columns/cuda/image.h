// One call as records, in the order in which the device works: heavy columns first.
#pragma once
#include <algorithm>
#include <map>
#include <tuple>

#include "column.h"

namespace fxopt::cuda {

constexpr int64_t kMostParts = 64, kLeastPart = 64;  // of a bag; ids in one, on average

// Tiles serve columns of many rows, if so many of them have rows of one narrow width. H200, 1000 columns of 32 bytes: 56 us
// for 61 at batch 2048, but 11.8 for 10.7 at 256; 26 columns of 128 bytes took 6.3 for 5.7.
constexpr int64_t kLeastTiledRows = 1024;
constexpr ptrdiff_t kLeastTiledColumns = 200;

// Ids of a short bag, on average. H200, short bags as runs against each by itself: 26 x 2048 bags of one id 49 -> 23 us, of 0 to 44 ids 81 -> 53, a few of 100 among short ones 76 -> 43.
constexpr int64_t kMostShort = 8;
constexpr int64_t kLeastInBlock = 32;  // ids of a bag, on average, for which a block's warps come together

// Writes columns from `next` on into one image, as many as a launch has room for.
struct Builder : Columns {
  int warps;     // that the device runs at once
  int64_t bags;  // columns of them
  int span = 0;  // positions of an item without bags

  Builder(const Request& request, const OutputData* outputs, int warps) : Columns(request, outputs), warps(warps), bags(0) {
    for (int c = 0; c < resolver.plan.header->n_columns; c++) bags += resolver.plan.columns[c].pool != kNone;
  }

  Image build(int& next) {
    const Plan& plan = resolver.plan;
    std::map<Key, Units> classes;
    while (next < plan.header->n_columns && int(classes.size()) < kSegments) {
      const int end = slot_end(next);
      size_t words = resolver.words.values.size();
      for (int c = next; c < end; c++) words += 8;
      if (words > kWords) {
        if (classes.empty()) refused("column %d: its slot needs more tensors than a launch carries", plan.columns[next].index);
        break;
      }
      std::vector<Record> chain;
      for (int c = next; c < end; c++) chain.push_back(record(plan.columns[c], end == next + 1));
      const OutputData& output = outputs[plan.columns[next].output];
      next = end;
      const int width = output.rows ? bag_width(chain, output.rows) : 0;
      const int64_t positions = output.rows * chain[0].lanes;
      const int parts = width == 32 ? bag_parts(chain, output.rows) : 1;
      const int together = width ? bags_together(chain, output.rows, width, parts) : 0;
      if (width && fits_a_block(chain, output.rows, width, parts)) {
        classes[{false, -width, -parts, output.rows, 0, together}].push_back(std::move(chain));
      } else if (width) {
        classes[{true, -width, -parts, output.rows, 0, together}].push_back(std::move(chain));
      } else if (positions && chain.size() == 1) {
        for (const Record& piece : pieces(chain[0], output.rows)) classes[{true, 0, -1, output.rows, output.rows * piece.lanes, 0}].push_back({piece});
      } else if (positions) {
        classes[{true, 0, -1, output.rows, positions, 0}].push_back(std::move(chain));
      }
    }
    leave_blocks(classes);
    span = span_of_items(classes);
    std::vector<std::pair<Key, Units>> tiled;
    for (auto& [key, units] : classes) {
      for (uint32_t chunks : {1, 2, 4})
        if (!in_blocks(*classes.begin()) && classes.size() + tiled.size() < kSegments) take_tiled(key, units, chunks, tiled);
      if (!units.empty()) add_segment(key, units, 0);
    }
    for (auto& [key, units] : tiled) add_segment(key, units, int(units[0][0].chunks));
    image.words = std::move(resolver.words.values);
    return std::move(image);
  }

 private:
  // No block to a bag, -width, -parts, rows, positions, bags of an item. Blocks come first, so that their items fill them.
  using Key = std::tuple<bool, int, int, int64_t, int64_t, int>;
  using Units = std::vector<std::vector<Record>>;

  // Of a unit whose columns have bags.
  static int64_t items_of_bags(const Key& key) {
    const auto [no_block, negative_width, negative_parts, rows, positions, bags] = key;
    return no_block ? (rows + bags - 1) / bags * -negative_parts : rows * kWarps;
  }

  // Positions that an item of columns without bags covers: so many that all items run at once where they can, in the half of
  // the warps that registers allow. Those of bags count: else what comes behind them is a second round of few warps (H200,
  // with short bags by runs: E's columns 14.3 -> 11.5 us at batch 256, 10.5 -> 8.6 at 64; E whole 61.7 -> 57.4 at 256). But bags
  // that fill the device leave it half to what is behind them (an FM's columns at batch 2048: 22.0 us with few items there).
  int span_of_items(const std::map<Key, Units>& classes) const {
    int64_t heavy = 0, light = 0;
    for (const auto& [key, units] : classes) {
      const auto [no_block, negative_width, negative_parts, rows, positions, bags] = key;
      if (!negative_width) light += int64_t(units.size()) * ((positions + 31) / 32);
      else if (no_block) heavy += int64_t(units.size()) * items_of_bags(key);
    }
    int positions = 32;
    const int64_t others = std::max<int64_t>(warps / 2 - heavy, warps / 4);
    while (positions < kMostSpan && light / (positions / 32) > others) positions *= 2;
    return positions;
  }

  // Moves the units that tiles of so many chunks a row serve to a class of their own, if they are many.
  static void take_tiled(const Key& key, Units& units, uint32_t chunks, std::vector<std::pair<Key, Units>>& tiled) {
    auto fits = [&](const std::vector<Record>& chain) {
      const Record& r = chain[0];
      return chain.size() == 1 && r.kind == kRows && r.way != kAnyWay && r.ids.view.inner == 0 && r.chunk_bytes == 16 && r.chunks == chunks;
    };
    if (std::get<4>(key) < kLeastTiledRows || std::count_if(units.begin(), units.end(), fits) < kLeastTiledColumns) return;
    const auto taken = std::stable_partition(units.begin(), units.end(), [&](const auto& chain) { return !fits(chain); });
    tiled.emplace_back(key, Units(std::make_move_iterator(taken), std::make_move_iterator(units.end())));
    units.erase(taken, units.end());
  }

  // Where the columns of the slot of column `first` end: a plan tensor holds them side by side, in plan order.
  int slot_end(int first) const {
    const Column* columns = resolver.plan.columns;
    int end = first + 1;
    while (end < resolver.plan.header->n_columns && columns[end].output == columns[first].output && columns[end].offset == columns[first].offset) end++;
    return end;
  }

  // Lanes of a warp that share a bag, 0 where the unit's columns have no bags. More do while all bags fill at most a
  // quarter of the device: lookups behind them run beside them (H200, an FM's columns at batch 2048: 15.7 us where bags may
  // fill it, half 12.1, a quarter 10.4).
  int bag_width(const std::vector<Record>& chain, int64_t rows) const {
    bool pools = false, lanes = false;
    for (const Record& r : chain) pools |= r.kind >= kBags, lanes |= r.lanes != chain[0].lanes;
    if (!pools) return lanes ? 32 : 0;
    if (chain.size() > 1 || chain[0].kind == kBagsAny) return 32;
    int width = std::max(4, 1 << chain[0].group_log2);
    while (width < 32 && width * rows < ids_of(chain[0], rows) && bags * rows * width <= 4 * int64_t(warps)) width *= 2;
    return width;
  }

  int64_t ids_of(const Record& r, int64_t rows) const { return r.flags & kDense ? r.lanes * rows : resolver.words.values[image.rares[r.extra].bounds_word]; }

  // Warps among which each long bag is cut where few bags wait; an order of additions that sizes and device decide.
  int bag_parts(const std::vector<Record>& chain, int64_t rows) const {
    if (chain.size() > 1 || chain[0].kind < kBags) return 1;
    return int(std::max<int64_t>(1, std::min({kMostParts, ids_of(chain[0], rows) / (rows * kLeastPart), warps / (bags * rows)})));
  }

  // Whether the warps of a block share a bag, and add their parts up in shared memory: of few bags that are not plain, which
  // keep their order of additions.
  bool fits_a_block(const std::vector<Record>& chain, int64_t rows, int width, int parts) const {
    const Record& r = chain[0];
    if (chain.size() > 1 || r.kind < kBags || (r.flags & (kPlain | kAccurate)) || r.pool == kMax || width < 32 || part_stride(r) > kShared) return false;
    return parts <= kWarps && ids_of(r, rows) >= kLeastInBlock * rows && bags * rows * kWarps <= warps;
  }

  static bool in_blocks(const std::pair<const Key, Units>& one) { return !std::get<0>(one.first); }

  // A launch with other bags too has no blocks that share one.
  void leave_blocks(std::map<Key, Units>& classes) const {
    const bool others = std::any_of(classes.begin(), classes.end(), [](const auto& one) { return !in_blocks(one) && std::get<1>(one.first); });
    while (others && in_blocks(*classes.begin())) {
      Key key = classes.begin()->first;
      Units units = std::move(classes.begin()->second);
      classes.erase(classes.begin());
      std::get<0>(key) = true;
      std::move(units.begin(), units.end(), std::back_inserter(classes[key]));
    }
  }

  // Bags that an item takes: short ones as runs where items of a few would be more than an eighth of the warps (H200, E whole
  // at batch 256: 57.4 us; 61.8 from half of the warps on, which leaves its bags as they are).
  int bags_together(const std::vector<Record>& chain, int64_t rows, int width, int parts) const {
    const Record& r = chain[0];
    const bool fits = kShortBags && chain.size() == 1 && r.kind == kBags && r.pool != kMax && r.table_dtype == kFloat && r.chunk_bytes == 16 && r.chunks <= 32;
    const bool plain = (r.flags & (kPlain | kDense)) == kPlain && parts == 1;
    if (!fits || !plain || ids_of(r, rows) > std::min<int64_t>(kMostShort * rows, INT32_MAX) || bags * rows * width <= 4 * int64_t(warps)) return 32 / width;
    return kBeside * (32 >> r.group_log2);
  }

  // A PartTotals, then sums or maxima, of maxima also the first values; in floats, 16 bytes at a time.
  static int32_t part_stride(const Record& r) {
    const int64_t floats = r.dim * (r.pool == kMax ? 2 : 1) * (r.flags & kAccurate ? 2 : 1);
    return int32_t((kTotalsFloats + floats + 3) / 4 * 4);
  }

  // `chunks`: of tiles, which come after all that are not; 0: no tiles.
  void add_segment(const Key& key, const Units& units, int chunks) {
    const auto [no_block, negative_width, negative_parts, rows, positions, bags] = key;
    const int width = -negative_width, parts = no_block ? -negative_parts : kWarps;
    Segment segment{rows, positions, int32_t(image.items + image.tiles), int32_t(image.records.size()), int32_t(units.size()), width, parts, 0, nullptr, chunks, bags};
    int64_t per_unit;
    if (width) {
      per_unit = items_of_bags(key);
      if (no_block && parts > 1)
        for (const auto& chain : units) segment.part_stride = std::max(segment.part_stride, part_stride(chain[0]));
    } else {
      if (positions > UINT32_MAX - 256) refused("fxopt.columns: more than 2^32 positions in a column");
      segment.span = span;
      per_unit = (positions + span - 1) / span;
    }
    if (chunks) image.tiles += per_unit * ((int64_t(units.size()) + kWarps - 1) / kWarps);
    else image.items += per_unit * int64_t(units.size());
    if (!no_block) image.in_blocks = image.items;
    if (image.items + image.tiles > INT32_MAX) refused("fxopt.columns: a call of more than 2^31 work items");
    image.segments.push_back(segment);
    const size_t heads = image.records.size();
    for (auto& chain : units) image.records.push_back(chain[0]);
    for (size_t u = 0; u < units.size(); u++) {
      size_t last = heads + u;
      for (size_t k = 1; k < units[u].size(); k++) {
        image.records[last].next = int32_t(image.records.size());
        last = image.records.size();
        image.records.push_back(units[u][k]);
      }
    }
  }
};

}  // namespace fxopt::cuda
