//! Gathers that another library does, through the hooks: what FSDP2 does with them, imitated byte for byte, gives the
//! tensors of the gather engine and of one rank, for every recipe, cut and world.

use std::cell::Cell;
use std::ops::Range;

use crate::common::{bytes, casts_flat, tiling, variants};
use crate::fsdp::{Content, Fsdp, Full, One, Param, content, memory, whole};
use lowp_format::{
    AnyRecipe, BufferKey, BufferList, Orientation, Origin, Phase, Quantizers, Recipe,
    RecipeOptions, Role, RowCuts, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer};
use lowp_shard::{GatherHooks, HookInput, HookSource, ShardSpec};

/// One gather of a parameter on all ranks, and what became of it so far.
struct Trip {
    hooks: GatherHooks,
    /// What is there before the rest is derived.
    first: Usage,
    fsdp: Fsdp,
    arrived: Vec<CpuBuffer<u8>>,
    fulls: Vec<Full>,
    /// Where the buffers of each gather are.
    places: Vec<Vec<Range<usize>>>,
    allocated: Cell<usize>,
}

impl Trip {
    fn new(param: &Param, hooks: GatherHooks, first: Usage) -> Self {
        Self {
            first,
            fsdp: Fsdp::new(param, &hooks),
            arrived: memory(&hooks),
            fulls: Vec::new(),
            places: Vec::new(),
            allocated: Cell::new(0),
            hooks,
        }
    }

    /// Gathers into the memory of the gathers before, and checks every byte: `gathered` is what the gather engine makes of the weight,
    /// `expected` what one rank does.
    fn go(&mut self, param: &Param, gathered: &[Option<Content>; 2], expected: &Content) {
        let what = self.hooks.text();
        let (hooks, first) = (&self.hooks, self.first);
        let sent = self.fsdp.gather(&self.arrived);
        for (rank, (sent, shard)) in sent.iter().zip(&param.shards).enumerate() {
            if self.places.is_empty() {
                let full = sent.post_all_gather_with(&Cpu, shard, &self.arrived, |output| {
                    self.allocated.set(self.allocated.get() + 1);
                    assert!(output.has_memory());
                    Ok(Cpu.upload(&bytes(9, output.bytes))?)
                });
                self.fulls.push(full.expect(what));
            } else {
                sent.post_all_gather_into(&Cpu, shard, &self.arrived, &mut self.fulls[rank])
                    .expect(what);
            }
            let full = &mut self.fulls[rank];
            let now = content(full.tensor().expect(what));
            assert!(full.tensor().expect(what).usage().contains(first), "{what}");
            assert!(now.iter().all(|buffer| expected.contains(buffer)), "{what}");
            for (phase, gathered) in Phase::ALL.into_iter().zip(gathered) {
                if hooks.usage() == phase.usage() && first == hooks.usage() {
                    assert_eq!(
                        sorted(&now),
                        sorted(gathered.as_ref().expect(what)),
                        "{what}"
                    );
                }
            }
            for _ in 0..2 {
                full.derive(&Cpu).expect(what);
            }
            assert_eq!(&content(full.tensor().expect(what)), expected, "{what}");
            assert_eq!(full.planned(), 1);
            let own = hooks.outputs().iter().filter(|o| o.has_memory()).count();
            assert_eq!(self.allocated.get(), own * self.fulls.len(), "{what}");
        }
        let buffers = self
            .fulls
            .iter()
            .flat_map(|full| full.tensor().expect(what).buffers());
        self.places
            .push(buffers.map(|b| Cpu.span(&b.storage)).collect());
        assert_eq!(self.places.first(), self.places.last(), "{what}");
    }
}

/// Gathers each of `hooks` twice, into the same memory, with other weights the second time. The usage beside it is there before the rest
/// is derived.
fn trips(param: &Param, hooks: Vec<(GatherHooks, Usage)>) {
    let trip = |(hooks, first)| Trip::new(param, hooks, first);
    let mut trips: Vec<_> = hooks.into_iter().map(trip).collect();
    for seed in [1, 2] {
        let gathered = param.cast(seed);
        let mut wholes: Vec<(Usage, Content)> = Vec::new();
        for trip in &mut trips {
            let usage = trip.hooks.usage();
            let known = wholes.iter().position(|(of, _)| *of == usage);
            let known = known.unwrap_or_else(|| {
                let whole = whole(param.recipe, param.shape, usage, seed);
                wholes.push((usage, whole));
                wholes.len() - 1
            });
            trip.go(param, &gathered, &wholes[known].1);
        }
    }
}

fn sorted(content: &Content) -> Content {
    let mut sorted = content.clone();
    sorted.sort();
    sorted
}

/// All gathers that hooks can do of a parameter.
fn round_trips(param: &Param) {
    let shard = &param.shards[0];
    let [forward, backward] = GatherHooks::phases(param.recipe, shard.spec()).expect("hooks");
    let mut all = vec![(forward, Usage::ROWWISE), (backward, Usage::COLUMNWISE)];
    for (usage, first) in [
        (Usage::ROWWISE, Usage::ROWWISE),
        (Usage::COLUMNWISE, Usage::COLUMNWISE),
        (Usage::COLUMNWISE, Usage::empty()),
        (Usage::BOTH, Usage::BOTH),
        (Usage::BOTH, Usage::ROWWISE),
        (Usage::BOTH, Usage::COLUMNWISE),
    ] {
        let hooks = GatherHooks::with_usage(param.recipe, shard.spec(), usage, first);
        all.push((hooks.expect("hooks"), first));
    }
    trips(param, all);
}

#[test]
fn every_recipe_row_count_and_world() {
    for recipe in variants() {
        let (rows, worlds): (&[usize], _) = match AnyRecipe::all().contains(&recipe) {
            true => (&[0, 1, 17, 63, 64, 136, 192], 1..=5),
            false => (&[0, 64, 136], 3..=3),
        };
        for &rows in rows {
            for world in worlds.clone().filter(|world| (rows + world) % 2 == 1) {
                round_trips(&Param::even(recipe, rows, world));
            }
        }
    }
}

/// Padding may lie between pieces, which are joined then: as full buffers, before they are interleaved, and as sources of
/// transposes.
#[test]
fn cuts_at_the_quantum_need_not_be_even() {
    let mut staged = Vec::new();
    for recipe in AnyRecipe::all() {
        let quantum = recipe.row_quantum(Usage::BOTH);
        for i in 0..27 {
            let [a, b, c] = [i % 3, i / 3 % 3, i / 9].map(|blocks| blocks * quantum);
            // Rows past the last multiple, half of the time.
            let cuts = RowCuts::from_ranges(&tiling(&[a, b, c + i % 2 * 5])).expect("cuts");
            let param = Param::new(recipe, cuts, 64, Usage::BOTH);
            round_trips(&param);
            let spec = param.shards[0].spec();
            let hooks = GatherHooks::new(recipe, spec, Phase::Backward).expect("hooks");
            if hooks.staged_bytes() > 0 {
                staged.push(recipe.name());
            }
        }
    }
    staged.dedup();
    assert!(
        staged.contains(&"fp8-current") && staged.contains(&"nvfp4-1d"),
        "{staged:?}"
    );
}

/// Wherever `torch.chunk` cuts, FSDP2's own shards gather: also within blocks and, of columnwise codes, within bytes.
#[test]
fn rows_cut_as_fsdp2_does() {
    for recipe in variants().into_iter().filter(casts_flat) {
        let mut cut = 0;
        for (i, (rows, world)) in [
            (64, 2),
            (96, 3),
            (100, 4),
            (160, 4),
            (20, 3),
            (5, 8),
            (127, 1),
            (41, 9),
            (130, 2),
            (33, 6),
            (160, 7),
        ]
        .into_iter()
        .enumerate()
        {
            // All usages of the recipes themselves, one of each variant.
            let usages = [Usage::BOTH, Usage::ROWWISE, Usage::COLUMNWISE];
            let usages = match AnyRecipe::all().contains(&recipe) {
                true => &usages[..],
                false => &usages[i % 3..][..1],
            };
            for &usage in usages {
                let param = Param::chunked(recipe, Shape::new(rows, 64), world, usage);
                let chunk = rows.div_ceil(world);
                for (rank, range) in param.cuts.ranges().enumerate() {
                    let [start, end] = [rank, rank + 1].map(|rank| (rank * chunk).min(rows));
                    assert_eq!(range, start..end);
                }
                let spec = param.shards[0].spec();
                let off = world > 1 && chunk % recipe.row_quantum(usage) != 0;
                assert_eq!(spec.cuts_blocks(), off);
                cut += usize::from(off);
                if usage == Usage::BOTH {
                    round_trips(&param);
                    continue;
                }
                let phases = Phase::ALL.into_iter().filter(|p| usage.contains(p.usage()));
                let hooks = phases.map(|phase| {
                    let hooks = GatherHooks::new(recipe, spec, phase).expect("hooks");
                    (hooks, phase.usage())
                });
                trips(&param, hooks.collect());
            }
        }
        assert_eq!(cut > 0, recipe.row_quantum(Usage::BOTH) > 1);
    }
}

/// What a rank stores of rows that cut blocks: its codes, and every scale once.
#[test]
fn rows_that_cut_blocks_send_codes_alone() {
    let recipe = AnyRecipe::from_name("mxfp8", &Default::default()).expect("a recipe");
    let param = Param::chunked(recipe, Shape::new(100, 64), 3, Usage::BOTH);
    let bytes: Vec<_> = param.shards.iter().map(|s| s.resident_bytes()).collect();
    let scales = 100 * 2 + 4 * 64;
    assert_eq!(bytes, [34, 34, 32].map(|rows| 2 * rows * 64 + scales));
    for hooks in GatherHooks::phases(recipe, param.shards[2].spec()).expect("hooks") {
        let sent: Vec<_> = hooks.inputs().iter().map(|input| input.padded).collect();
        assert_eq!(sent, [34 * 64]);
    }
}

/// A checkpoint has nothing for a rank without rows, whose scales stay those of before.
#[test]
fn a_rank_without_rows_gathers_the_scales_of_others() {
    let cut = |recipe: &AnyRecipe| recipe.row_quantum(Usage::BOTH) > 1;
    for recipe in AnyRecipe::all().into_iter().filter(cut) {
        let param = Param::chunked(recipe, Shape::new(5, 64), 4, Usage::BOTH);
        let shard = &param.shards[3];
        assert!(shard.spec().cuts_blocks() && shard.spec().rows().is_empty());
        let hooks = GatherHooks::kept(recipe, shard.spec()).expect("hooks");
        let fsdp = Fsdp::new(&param, &hooks);
        let arrived = memory(&hooks);
        param.cast(1);
        for buffer in shard.local().buffers() {
            let other = bytes(3, Cpu.len::<u8>(&buffer.storage));
            Cpu.write(&buffer.storage, 0, &other).expect("room");
        }
        for (sent, shard) in fsdp.gather(&arrived).iter().zip(&param.shards) {
            let full = sent.post_all_gather(&Cpu, shard, &arrived);
            let mut full = full.expect("a full tensor");
            full.derive(&Cpu).expect("derived");
            let expected = whole(recipe, param.shape, Usage::BOTH, 1);
            let found = content(full.tensor().expect("filled"));
            assert_eq!(found, expected, "{}", recipe.name());
        }
    }
}

/// On every rank: none of them gathers alone.
#[test]
fn rows_that_cut_blocks_of_four_over_six_say_what_to_do() {
    let mut options = RecipeOptions::default();
    options.set("four_over_six", "mse");
    let recipe = AnyRecipe::from_name("nvfp4-2d", &options).expect("a recipe");
    let spec = |rows, rank| ShardSpec::chunked(&recipe, Shape::new(rows, 64), 4, rank, Usage::BOTH);
    for rank in 0..4 {
        let text = spec(100, rank).expect_err("off the quantum").to_string();
        let expected = "100 rows over 4 ranks: nvfp4-2d both with four over six, which chooses by whole blocks, needs cuts at \
                        multiples of 16, and a sharder that cuts ceil(100 / 4) = 25 rows per rank cuts elsewhere; pad the \
                        parameter to 128 rows,";
        assert!(text.starts_with(expected), "{text}");
        // What it advises works.
        assert!(spec(128, rank).is_ok());
    }
    assert!(
        ShardSpec::chunked(
            &AnyRecipe::from_name("nvfp4-2d", &Default::default()).expect("a recipe"),
            Shape::new(100, 64),
            4,
            3,
            Usage::BOTH
        )
        .is_ok()
    );
}

/// Another recipe with both orientations exchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Exchanged(AnyRecipe);

impl Exchanged {
    fn usage(usage: Usage) -> Usage {
        let exchanged = |o: Orientation| Orientation::ALL[1 - o as usize].usage();
        usage.orientations().map(exchanged).collect()
    }

    fn key(key: BufferKey) -> BufferKey {
        BufferKey::new(Self::usage(key.usage), key.part)
    }
}

impl Recipe for Exchanged {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn quantizers(&self, role: Role) -> Quantizers {
        let own = self.0.quantizers(role);
        Quantizers {
            rowwise: own.columnwise,
            columnwise: own.rowwise,
            ..own
        }
    }

    fn buffers(&self, usage: Usage) -> BufferList {
        let mut buffers = self.0.buffers(Self::usage(usage));
        for spec in &mut buffers {
            spec.key = Self::key(spec.key);
            if let Origin::TransposeOf(from) = &mut spec.origin {
                *from = Self::key(*from);
            }
        }
        buffers
    }
}

/// Rows cut as [`RowCuts::new`] and FSDP2 do arrive where they belong: padding never lies between them. What arrives in
/// one phase fits into the memory of the other, which FSDP2 keeps.
fn arrive_in_place<R: Recipe>(recipe: R) {
    for rows in 0..=130 {
        for world in [1, 2, 3, 4, 7, 40] {
            let spec = ShardSpec::new(&recipe, Shape::new(rows, 64), world, 0).expect("a shard");
            let [forward, backward] = GatherHooks::phases(recipe, &spec).expect("hooks");
            let kept = GatherHooks::kept(recipe, &spec).expect("hooks");
            let padded = |hooks: &GatherHooks<R>| -> Vec<usize> {
                hooks.inputs().iter().map(|input| input.padded).collect()
            };
            assert_eq!(padded(&forward), padded(&backward), "{}", forward.text());
            for hooks in [forward, backward, kept] {
                let what = hooks.text();
                let most = |input: &HookInput| input.pieces.iter().copied().max();
                // Where the other phase sends more, padding lies between the pieces.
                let less =
                    |input: &HookInput| most(input).is_some_and(|n| 0 < n && n < input.padded);
                let ranks = |input: &HookInput| input.pieces.iter().filter(|&&n| n > 0).count();
                let apart = |input: &HookInput| less(input) && ranks(input) > 1;
                if !hooks.inputs().iter().any(apart) {
                    assert_eq!(hooks.staged_bytes(), 0, "{what}");
                }
                for input in hooks.inputs() {
                    let joined = input.joined().map(|joined| joined.len());
                    let all = Some(input.pieces.iter().sum());
                    assert_eq!(joined, all.filter(|_| !apart(input)), "{what}");
                }
                for output in hooks.outputs() {
                    let copied = matches!(output.source, HookSource::Pieces { .. });
                    let moved =
                        |i: &HookInput| i.spec == output.spec && (i.interleaved || apart(i));
                    assert_eq!(copied, hooks.inputs().iter().any(moved), "{what}");
                }
            }
            // Recipes that send the same bytes in both phases have no such padding.
            let codes = recipe
                .quantizers(Role::Weight)
                .kernels()
                .map(|k| (k.element, k.scale.entry()));
            if codes[0] == codes[1] {
                let [forward, backward] = GatherHooks::phases(recipe, &spec).expect("hooks");
                let [a, b] = [forward, backward].map(|hooks| hooks.staged_bytes());
                assert_eq!((a, b), (0, 0), "{}", recipe.name());
            }
        }
    }
}

#[test]
fn rows_arrive_in_place_in_either_phase() {
    for recipe in AnyRecipe::all() {
        arrive_in_place(recipe);
        arrive_in_place(Exchanged(recipe));
    }
}

#[test]
fn rows_that_arrive_are_the_tensor() {
    let one = One::new("mxfp8", Phase::Forward);
    let (sent, full) = one.full(1);
    for (output, buffer) in sent
        .hooks()
        .outputs()
        .iter()
        .zip(full.tensor().expect("filled").buffers())
    {
        let HookSource::Arrived { input, bytes } = &output.source else {
            panic!("{output:?} is copied");
        };
        let Range { start, .. } = Cpu.span(&one.arrived[*input]);
        assert_eq!(
            Cpu.span(&buffer.storage),
            start + bytes.start..start + bytes.end
        );
    }
}
