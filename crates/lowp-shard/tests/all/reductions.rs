//! Reductions of the gradients of a block over many ranks: what NCCL is given for each bucket, counted. Nothing moves.

use std::fmt::Write as _;
use std::ops::Range;

use lowp_comm::{Adder, UnevenRun, even};
use lowp_format::{AnyRecipe, RecipeOptions, Shape, block_cuts};
use lowp_shard::{GradBucketOptions, GradLen, ShardError, ShardSpec, grad_bucket_ranges};

/// Width, hidden width and rows of keys and values of the blocks of Llama 3.
const MODELS: [(&str, usize, usize); 3] = [
    ("8b", 4096, 14336),
    ("70b", 8192, 28672),
    ("405b", 16384, 53248),
];

/// The elements that ranks own of each weight of a block, in the order of backward.
fn owned(
    recipe: AnyRecipe,
    (dim, hidden): (usize, usize),
    world: usize,
) -> Result<Vec<Vec<Range<usize>>>, ShardError> {
    let shapes = [
        (dim, dim),
        (1024, dim),
        (1024, dim),
        (dim, dim),
        (hidden, dim),
        (hidden, dim),
        (dim, hidden),
    ];
    let weights = shapes.map(|(rows, cols)| (recipe, Shape::new(rows, cols)));
    let cuts = block_cuts(&weights, world, 1)?;
    let specs = cuts.iter().rev();
    let specs = specs.map(|cuts| ShardSpec::of_block(&recipe, cuts, 0));
    specs.map(|spec| Ok(spec?.all_elements())).collect()
}

/// What ranks do to reduce a block.
#[derive(Debug, Default)]
struct Counts {
    /// Collectives.
    calls: usize,
    /// Parts that the rank which has most to do sends and receives beside them.
    parts: usize,
    /// In the worst bucket, the elements that arrive at the rank of most, over the mean.
    ratio: f64,
    /// The elements that arrive at each rank.
    arriving: Vec<usize>,
}

/// The most over the mean.
fn ratio(all: &[usize]) -> f64 {
    let most = all.iter().max().copied().unwrap_or(0);
    most as f64 * all.len() as f64 / all.iter().sum::<usize>() as f64
}

impl Counts {
    fn bucket(&mut self, calls: usize, parts: usize, arriving: &[usize]) {
        self.calls += calls;
        self.parts += parts;
        self.ratio = self.ratio.max(ratio(arriving));
        self.arriving.resize(arriving.len(), 0);
        let each = self.arriving.iter_mut().zip(arriving);
        each.for_each(|(sum, elements)| *sum += elements);
    }
}

/// A bucket of gradients, one after the other: each part by itself, and in even parts.
fn count(owned: &[Vec<Range<usize>>], world: usize, [pieces, runs]: &mut [Counts; 2]) {
    let mut start = 0;
    let mut placed = Vec::new();
    for ranges in owned {
        let place = |range: &Range<usize>| start + range.start..start + range.end;
        placed.push(ranges.iter().map(place).collect::<Vec<_>>());
        start = placed
            .iter()
            .flatten()
            .map(|range| range.end)
            .max()
            .unwrap_or(0);
    }
    let batch: Vec<&[Range<usize>]> = placed.iter().map(Vec::as_slice).collect();
    let operations = |ranges: &[Range<usize>]| match even(ranges) {
        Some(_) => 1,
        None => ranges.iter().filter(|range| !range.is_empty()).count(),
    };
    let calls = batch.iter().map(|ranges| operations(ranges)).sum();
    let owns = |rank: usize| batch.iter().map(|ranges| ranges[rank].len()).sum();
    pieces.bucket(calls, 0, &(0..world).map(owns).collect::<Vec<_>>());
    let places: Vec<_> = batch.iter().map(|&ranges| ((), ranges)).collect();
    let found = UnevenRun::find(&places, world, Adder::Library);
    let in_run = |item: usize| found.iter().any(|run| run.items.contains(&item));
    let alone: Vec<_> = (0..batch.len()).filter(|item| !in_run(*item)).collect();
    let remainders = found.iter().filter(|run| !run.remainder.is_empty()).count();
    let (mut arriving, mut most) = (vec![0; world], 0);
    for (rank, arriving) in arriving.iter_mut().enumerate() {
        *arriving = alone
            .iter()
            .map(|&item| batch[item][rank].len() * (world - 1))
            .sum();
        let mut parts = 0;
        for run in &found {
            let received = run.received(&batch, rank).into_iter();
            let received = received.filter(|from| from.peer != rank);
            let received: Vec<usize> = received.map(|from| from.elements.len()).collect();
            parts += received.len() + run.sent(&batch, rank).len();
            *arriving += run.parts[rank].len() * (world - 1) + run.remainder.len();
            *arriving += received.iter().sum::<usize>();
        }
        most = most.max(parts);
    }
    runs.bucket(alone.len() + found.len() + remainders, most, &arriving);
}

#[test]
fn reductions_of_llama() -> Result<(), Box<dyn std::error::Error>> {
    let mut table =
        "Arriving at the rank of most, over the mean: in the worst bucket, and of the block\n\
                         each part by itself          in even parts\n\
block of  recipe     ranks  calls  bucket  block   calls  sends and receives  bucket  block\n"
            .to_owned();
    let most = GradBucketOptions::default().bytes / size_of::<f32>();
    for (model, dim, hidden) in MODELS {
        for name in ["fp8-block", "mxfp8"] {
            let recipe = AnyRecipe::from_name(name, &RecipeOptions::default())?;
            for world in [64, 256, 1024] {
                let owned = owned(recipe, (dim, hidden), world)?;
                let grads = owned.iter().map(|ranges| GradLen::new(ranges, Some(0)));
                let grads: Vec<GradLen> = grads.collect();
                let mut counts = <[Counts; 2]>::default();
                let buckets = grad_bucket_ranges(&grads, most);
                for bucket in &buckets {
                    count(&owned[bucket.clone()], world, &mut counts);
                }
                let [pieces, runs] = &counts;
                // A reduce-scatter and what does not divide evenly, or one of each weight.
                assert!(
                    runs.calls <= 2 * grads.len(),
                    "{model} {name} {world}: {runs:?}"
                );
                let [alone, together] = [pieces, runs].map(|of| ratio(&of.arriving));
                assert!(together <= 1.1, "{model} {name} {world}: {together}");
                assert!(runs.ratio <= 1.1, "{model} {name} {world}: {runs:?}");
                writeln!(
                    table,
                    "{model:<9} {name:<9} {world:>6} {:>6} {:>7.2} {alone:>6.2} {:>7} {:>19} {:>7.2} {together:>6.2}",
                    pieces.calls, pieces.ratio, runs.calls, runs.parts, runs.ratio
                )?;
            }
        }
    }
    insta::assert_snapshot!(table);
    Ok(())
}
