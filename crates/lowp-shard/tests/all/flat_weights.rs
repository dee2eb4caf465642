//! Full weights on every rank, cast from flat slices: the bytes of a full quantize for any mix of recipes,
//! any cuts and any number of ranks, and nothing but the own elements written before the gather.

use crate::common::{self, Comm, bytes, failing, ranks, values};
use lowp_comm::LocalComm;
use lowp_format::{
    AnyRecipe, Axis, BufferSpec, Origin, Part, QuantizedTensor, Recipe, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError, Source};
use lowp_shard::{
    CastItem, CastPlan, FlatMaster, FlatParam, FlatShard, FlatWeights, ScaleBookBuilder,
    ShardError, cast_master_weights, quantize,
};
use proptest::prelude::*;

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

/// One parameter: what it is, and where the ranks' slices end.
#[derive(Clone, Debug)]
struct Case {
    recipe: AnyRecipe,
    shape: Shape,
    usage: Usage,
    /// Of every rank, in rank order.
    ends: Vec<usize>,
    seed: u64,
}

impl Case {
    fn range(&self, rank: usize) -> std::ops::Range<usize> {
        let start = rank.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[rank]
    }

    fn values(&self, step: u64) -> Vec<f32> {
        values(self.seed ^ step << 32, self.shape.elements())
    }

    /// A tensor of noise.
    fn tensor(&self) -> Tensor {
        let made = QuantizedTensor::new(self.recipe, self.shape, self.usage, |spec, len| {
            let noise = noise(spec, len);
            Ok::<_, ShardError>(Cpu.upload(&noise)?)
        });
        made.expect("a shape that fits")
    }

    fn whole(&self) -> Tensor {
        let source = Source::F32(Cpu.upload(&self.values(0)).expect("memory"));
        let whole = quantize(&Cpu, self.recipe, self.shape, self.usage, source, None);
        whole.expect("quantized")
    }

    fn param(
        &self,
        tensor: &Tensor,
        rank: usize,
        book: &mut ScaleBookBuilder,
    ) -> Result<FlatParam<Cpu>, ShardError> {
        let range = self.range(rank);
        let master = Cpu.upload(&self.values(0)[range.clone()])?;
        FlatParam::new(&Cpu, tensor, range.start, Source::F32(master), book)
    }
}

fn noise(spec: &BufferSpec, len: usize) -> Vec<u8> {
    bytes(u64::from(spec.key.usage.bits()) + 7, len)
}

fn any_case(world: usize) -> impl Strategy<Value = Case> {
    let recipes = common::variants()
        .into_iter()
        .filter(common::casts_flat)
        .collect::<Vec<_>>();
    let usages = [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH];
    (
        proptest::sample::select(recipes),
        0usize..70,
        1usize..70,
        proptest::sample::select(usages.to_vec()),
        prop::collection::vec(0.0f64..1.2, world - 1),
        any::<u64>(),
    )
        .prop_map(|(recipe, rows, cols, usage, cuts, seed)| {
            let fits = |cols: &usize| recipe.check(Shape::new(rows, *cols)).is_ok();
            let cols = (cols..).find(fits).expect("a multiple of the blocks");
            let shape = Shape::new(rows, cols);
            let all = shape.elements();
            let end = |cut: &f64| ((cut * all as f64) as usize).min(all);
            let mut ends: Vec<usize> = cuts.iter().map(end).chain([all]).collect();
            ends.sort_unstable();
            Case {
                recipe,
                shape,
                usage,
                ends,
                seed,
            }
        })
}

fn any_cases() -> impl Strategy<Value = Vec<Case>> {
    (1usize..=5).prop_flat_map(|world| prop::collection::vec(any_case(world), 1..4))
}

/// What of `tensor` is as it was filled, and what as `whole` has it: before the gather, and before the
/// derived buffers are made.
fn check(case: &Case, rank: usize, tensor: &Tensor, whole: &Tensor, gathered: bool) {
    for (buffer, expected) in tensor.buffers().iter().zip(whole.buffers()) {
        let spec = &buffer.spec;
        let own = FlatShard::new(case.shape, spec.code, case.range(rank)).expect("inside");
        let (found, full) = (
            Cpu.download(&buffer.storage).expect("bytes"),
            Cpu.download(&expected.storage).expect("bytes"),
        );
        let before = noise(spec, found.len());
        let later = match (spec.origin, spec.key.part) {
            (Origin::TransposeOf(_), _) => true,
            (_, Part::Data | Part::BlockScale) => spec.axes[0] == Axis::Cols,
            _ => false,
        };
        // Those of other ranks come with their elements.
        if spec.key.part == Part::BlockScale && !gathered && !later {
            continue;
        }
        let data = spec.key.part == Part::Data;
        for (at, &byte) in found.iter().enumerate() {
            let owned = match own.bytes().contains(&at) {
                _ if later => 0,
                _ if !data || gathered => 0xFF,
                true => !own.foreign_bits(at - own.bytes().start),
                false => 0,
            };
            let expected = full[at] & owned | before[at] & !owned;
            assert_eq!(
                byte, expected,
                "{} byte {at} of rank {rank}: {case:?}",
                spec.key
            );
        }
    }
}

fn same(found: &Tensor, expected: &Tensor, what: &dyn std::fmt::Debug) {
    for (found, expected) in found.buffers().iter().zip(expected.buffers()) {
        let download = |buffer: &CpuBuffer<u8>| Cpu.download(buffer).expect("bytes");
        let key = found.spec.key;
        assert_eq!(
            download(&found.storage),
            download(&expected.storage),
            "{key}: {what:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 128 } else { 512 }))]

    #[test]
    fn any_mix_of_recipes_and_cuts_gives_the_full_quantize(cases in any_cases()) {
        let whole: Vec<Tensor> = cases.iter().map(Case::whole).collect();
        ranks(cases[0].ends.len(), |rank, comm| {
            let tensors: Vec<Tensor> = cases.iter().map(Case::tensor).collect();
            let mut book = ScaleBookBuilder::default();
            let params = cases.iter().zip(&tensors).map(|(case, t)| case.param(t, rank, &mut book));
            let params = params.collect::<Result<Vec<_>, _>>()?;
            let book = book.build(&Cpu)?;
            let flat = FlatWeights::new(&Cpu, &comm, &book, &params)?;
            let before = comm.traffic();
            flat.calibrate(&book)?;
            let reductions = comm.traffic().since(before).calls;
            assert!(reductions <= 1, "{reductions} reductions");
            let all = || cases.iter().zip(&tensors).zip(&whole);
            all().for_each(|((case, tensor), whole)| check(case, rank, tensor, whole, false));
            let before = comm.traffic();
            let after = flat.after_cast();
            after.gather()?;
            let traffic = comm.traffic().since(before);
            assert!(traffic.calls <= 1, "{} gathers", traffic.calls);
            let sent = traffic.all_gather_bytes;
            assert_eq!((after.sent_bytes() as u64, after.counted_sent_bytes()), (sent, sent));
            all().for_each(|((case, tensor), whole)| check(case, rank, tensor, whole, true));
            after.post_all_gather()?;
            all().for_each(|((case, tensor), whole)| same(tensor, whole, case));
            Ok(())
        });
    }

    /// Steps with delayed scales: every rank has the bytes and the scales of one rank that has all rows.
    #[test]
    fn casts_of_many_steps_are_those_of_one_rank(cases in any_cases()) {
        let steps = 3;
        let alone: Vec<Tensor> = cases.iter().map(Case::tensor).collect();
        let mut builder = ScaleBookBuilder::default();
        let mut masters = Vec::new();
        let items: Vec<_> = cases.iter().zip(&alone).map(|(case, tensor)| {
            let master = Cpu.alloc::<f32>(case.shape.elements()).expect("memory");
            masters.push(master.clone());
            CastItem::rows(tensor, Source::F32(master), &mut builder)
        }).collect();
        let one = builder.build(&Cpu).expect("a book");
        let cast = CastPlan::new(&Cpu, &one, &items).expect("planned");
        let solo = LocalComm::solo(&Cpu);
        let mut expected = Vec::new();
        for step in 0..steps {
            for (case, master) in cases.iter().zip(&masters) {
                Cpu.write(master, 0, &case.values(step)).expect("written");
            }
            cast.run(&one, &solo).expect("cast");
            let copies: Vec<Tensor> = alone.iter().map(copy).collect();
            expected.push((copies, one.scales().expect("scales")));
        }
        ranks(cases[0].ends.len(), |rank, comm| {
            let tensors: Vec<Tensor> = cases.iter().map(Case::tensor).collect();
            let mut book = ScaleBookBuilder::default();
            let mut masters = Vec::new();
            let mut params = Vec::new();
            for (case, tensor) in cases.iter().zip(&tensors) {
                let range = case.range(rank);
                let master = Cpu.alloc::<f32>(range.len())?;
                masters.push(master.clone());
                params.push(FlatParam::new(&Cpu, tensor, range.start, Source::F32(master), &mut book)?);
            }
            let book = book.build(&Cpu)?;
            let flat = FlatWeights::new(&Cpu, &comm, &book, &params)?;
            for (step, (expected, scales)) in (0..).zip(&expected) {
                for (case, master) in cases.iter().zip(&masters) {
                    Cpu.write(master, 0, &case.values(step)[case.range(rank)])?;
                }
                flat.run(&book)?;
                assert_eq!(&book.scales()?, scales);
                for ((tensor, expected), case) in tensors.iter().zip(expected).zip(&cases) {
                    same(tensor, expected, &(step, case));
                }
            }
            Ok(())
        });
    }
}

fn copy(tensor: &Tensor) -> Tensor {
    let copy = |b: &lowp_format::Buffer<CpuBuffer<u8>>| Cpu.upload(&Cpu.download(&b.storage)?);
    tensor.try_map(copy).expect("copied")
}

/// Of two amaxes per 32 or 16 elements, ranks agree on those of blocks that a cut goes through; the scales of others are gathered.
#[test]
fn only_amaxes_of_blocks_on_cuts_are_agreed() {
    let shape = Shape::new(256, 128);
    let quarter = shape.elements() / 4;
    for (recipe, blocks, whole) in [
        ("mxfp8", 2 * 256 * 128 / 32, 0),
        ("nvfp4-1d", 2 * 256 * 128 / 16, 4),
    ] {
        // Between rows of blocks, and in the middle of a row within a block: one of its blocks, and a row of those along columns.
        for (shift, on_cuts) in [(0, 0), (5 * 128 + 72, 3 * (1 + 128))] {
            let ends = (1..=4).map(|rank| {
                if rank == 4 {
                    4 * quarter
                } else {
                    rank * quarter + shift
                }
            });
            let recipe = AnyRecipe::from_name(recipe, &Default::default()).expect("a recipe");
            let case = Case {
                recipe,
                shape,
                usage: Usage::BOTH,
                ends: ends.collect(),
                seed: 3,
            };
            let sent = ranks(4, |rank, comm| {
                let tensor = case.tensor();
                let mut book = ScaleBookBuilder::default();
                let param = case.param(&tensor, rank, &mut book)?;
                let book = book.build(&Cpu)?;
                assert_eq!(book.observed().len(), blocks + whole / 4);
                let flat = FlatWeights::new(&Cpu, &comm, &book, &[param])?;
                let before = comm.traffic();
                flat.calibrate(&book)?;
                let agreed = comm.traffic().since(before).all_reduce_bytes as usize;
                flat.after_cast().run()?;
                same(&tensor, &case.whole(), &case);
                assert_eq!(agreed, whole + 4 * on_cuts, "{recipe:?} {shift}");
                Ok(flat.after_cast().sent_bytes())
            });
            // Codes of both orientations, and a byte for each block.
            let codes = 2 * shape.elements() * if whole == 0 { 2 } else { 1 } / 2;
            let sent: usize = sent.iter().sum();
            assert_eq!(sent, codes + blocks - on_cuts, "{recipe:?} {shift}");
        }
    }
}

/// Every recipe with a cut through a byte, ranks that own one element, and ranks that own none.
fn hard_cuts() -> Vec<Case> {
    let shape = Shape::new(33, 64);
    let all = shape.elements();
    let case = |(seed, recipe)| Case {
        recipe,
        shape,
        usage: Usage::BOTH,
        ends: vec![0, 1, 2, 3, 3, 66, 67, 1_001, all, all],
        seed,
    };
    let recipes = common::variants().into_iter().filter(common::casts_flat);
    (0..).zip(recipes).map(case).collect()
}

#[test]
fn one_call_casts_every_recipe_over_cuts_through_bytes() {
    let cases = hard_cuts();
    let whole: Vec<Tensor> = cases.iter().map(Case::whole).collect();
    ranks(10, |rank, comm| {
        let tensors: Vec<Tensor> = cases.iter().map(Case::tensor).collect();
        let mut weights = Vec::new();
        for (case, tensor) in cases.iter().zip(&tensors) {
            let range = case.range(rank);
            weights.push(FlatMaster {
                tensor,
                // Where a slice of nothing begins is of no account.
                start: if range.is_empty() { 5 } else { range.start },
                master: Source::F32(Cpu.upload(&case.values(0)[range])?),
            });
        }
        cast_master_weights(&Cpu, &comm, &weights)?;
        for ((tensor, whole), case) in tensors.iter().zip(&whole).zip(&cases) {
            same(tensor, whole, case);
        }
        Ok(())
    });
}

/// Casts the cases on one rank.
fn cast(cases: &[Case], rank: usize, comm: &Comm) -> Result<(), ShardError> {
    let tensors: Vec<Tensor> = cases.iter().map(Case::tensor).collect();
    let weights = cases.iter().zip(&tensors).map(|(case, tensor)| {
        let range = case.range(rank);
        let master = Source::F32(Cpu.upload(&case.values(0)[range.clone()])?);
        let start = range.start;
        Ok(FlatMaster {
            tensor,
            start,
            master,
        })
    });
    cast_master_weights(
        &Cpu,
        comm,
        &weights.collect::<Result<Vec<_>, ShardError>>()?,
    )
}

fn two_ranks(recipe: &str) -> Case {
    let recipe = AnyRecipe::from_name(recipe, &Default::default()).expect("a recipe");
    let shape = Shape::new(32, 32);
    let ends = vec![500, shape.elements()];
    Case {
        recipe,
        shape,
        usage: Usage::BOTH,
        ends,
        seed: 1,
    }
}

/// The blocks that a gather brings are not agreed on any more, which another gather might need.
#[test]
fn a_book_is_of_one_gather() {
    let case = two_ranks("mxfp8");
    let failed = failing(2, |rank, comm| {
        let tensor = case.tensor();
        let mut book = ScaleBookBuilder::default();
        let param = case.param(&tensor, rank, &mut book)?;
        let (book, params) = (book.build(&Cpu)?, [param]);
        FlatWeights::new(&Cpu, &comm, &book, &params)?;
        FlatWeights::new(&Cpu, &comm, &book, &params).map(drop)
    });
    assert_eq!(failed.cause, ShardError::TwoFlatGathers);
}

#[test]
fn slices_that_leave_a_gap_are_an_error_on_every_rank() {
    let case = two_ranks("mxfp8");
    let failed = failing(2, |rank, comm| {
        let mut case = case.clone();
        // Rank 1 begins where rank 0 does not end.
        case.ends[0] += rank;
        cast(&[case], rank, &comm)
    });
    let (shape, rank, start, expected) = (case.shape, 1, 501, 500);
    assert_eq!(
        failed.cause,
        ShardError::FlatTiling {
            shape,
            rank,
            start,
            expected
        }
    );
    assert!(failed.others.iter().all(|(_, result)| result.is_err()));
}

#[test]
fn ranks_with_other_recipes_are_an_error() {
    let names = ["mxfp8", "nvfp4-1d"];
    let failed = failing(2, |rank, comm| cast(&[two_ranks(names[rank])], rank, &comm));
    let text = failed.cause.to_string();
    assert!(names.iter().all(|name| text.contains(name)), "{text}");
    assert!(text.contains("the flat weights"), "{text}");
}

#[test]
fn a_slice_outside_its_matrix_and_a_weight_given_twice_are_errors() {
    let case = two_ranks("fp8-current");
    let tensor = case.tensor();
    let mut book = ScaleBookBuilder::default();
    let master = Source::F32(Cpu.upload(&[0.0; 5]).expect("memory"));
    let outside = FlatParam::new(&Cpu, &tensor, 1020, master, &mut book).err();
    let (start, end, shape) = (1020, 1025, case.shape);
    assert_eq!(outside, Some(ShardError::FlatRange { start, end, shape }));
    let failed = failing(2, |rank, comm| {
        let master = Source::F32(Cpu.upload(&case.values(0)[case.range(rank)])?);
        let tensor = case.tensor();
        let weight = FlatMaster {
            tensor: &tensor,
            start: case.range(rank).start,
            master,
        };
        cast_master_weights(&Cpu, &comm, &[weight.clone(), weight])
    });
    assert!(
        failed.cause.to_string().contains("the buffer is also used"),
        "{}",
        failed.cause
    );
}

/// Four over six compares the errors of whole blocks: every rank gets the error when it plans, before anything is cast.
#[test]
fn slices_with_four_over_six_are_an_error_on_every_rank() {
    let mut rejected = 0;
    for recipe in common::variants()
        .into_iter()
        .filter(|r| !common::casts_flat(r))
    {
        let shape = Shape::new(32, 32);
        let case = Case {
            recipe,
            shape,
            usage: Usage::BOTH,
            ends: vec![0, 512, shape.elements()],
            seed: 1,
        };
        let failed = failing(3, |rank, comm| {
            let (tensor, mut book) = (case.tensor(), ScaleBookBuilder::default());
            let param = case.param(&tensor, rank, &mut book);
            assert_eq!(param.as_ref().err(), Some(&KernelError::FlatChoice.into()));
            cast(std::slice::from_ref(&case), rank, &comm)
        });
        assert_eq!(failed.cause, KernelError::FlatChoice.into());
        assert!(failed.others.iter().all(|(_, result)| result.is_err()));
        let text = failed.cause.to_string();
        assert!(
            text.contains("four over six") && text.contains("rows"),
            "{text}"
        );
        rejected += 1;
    }
    assert!(rejected >= 12, "{rejected} recipes choose");
}
