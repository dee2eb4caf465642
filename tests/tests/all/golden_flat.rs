//! Golden vectors of flat shards (ZeRO-1): any split casts to the bytes of the full cast.

use std::collections::BTreeSet;

use lowp_comm::run_ranks;
use lowp_format::{
    AnyRecipe, Axis, Code, Form, Fp8Format, Orientation, Part, QuantizedTensor, RecipeOptions,
    ScaleLayout, Shape, SourceRounding, Usage,
};
use lowp_kernels::{AmaxJob, Backend, BlockAmax, Cpu, Source, Target, Work};
use lowp_shard::{
    CastItem, CastPlan, FlatParam, FlatShard, FlatWeights, ScaleBookBuilder, ShardError,
    flat_targets,
};
use lowp_tests::golden::{Golden, first_difference};
use lowp_tests::model::kernels;
use lowp_tests::world::TIMEOUT;

/// The golden name of a recipe, the recipe, the orientations whose bytes are in the files, and the
/// names of its scales. A missing vector fails the test.
type Case = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

const ROWS: &[&str] = &["rowwise"];
const BOTH: &[&str] = &["rowwise", "columnwise"];
const BLOCKS: &[&str] = &["rowwise_scale_inv", "columnwise_scale_inv"];
const CASES: [Case; 6] = [
    ("delayed", "fp8-delayed", ROWS, &["scale_inv"]),
    ("current", "fp8-current", ROWS, &["scale_inv"]),
    ("block2d", "fp8-block", ROWS, &["rowwise_scale_inv"]),
    ("mxfp8", "mxfp8", BOTH, BLOCKS),
    ("mxfp8_2d", "mxfp8-2d", BOTH, BLOCKS),
    (
        "nvfp4_2d",
        "nvfp4-2d",
        ROWS,
        &["reduced_amax_amax", "rowwise_scale_inv"],
    ),
];

/// Names of golden tensors.
type Names = BTreeSet<String>;

/// What must be compared for a case on `ranks` ranks.
fn required((prefix, _, orientations, scales): Case, ranks: usize) -> Names {
    let data = orientations.iter().flat_map(|o| {
        let pieces = (0..ranks).map(move |rank| format!("{prefix}.rank{rank}.{o}"));
        pieces.chain([format!("{prefix}.full_{o}_data")])
    });
    let scales = scales.iter().map(|name| format!("{prefix}.{name}"));
    data.chain(scales).collect()
}

/// The targets of one rank after the cast: what they hold and their bytes.
type Cast = Vec<(Target<Cpu>, Vec<u8>)>;

fn cast_on_ranks(recipe: AnyRecipe, golden: &Golden, scale: Option<f32>) -> Vec<Cast> {
    let cpu = Cpu;
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let x = golden.f32("x");
    let bounds = golden.usize("bounds");
    run_ranks(
        &cpu,
        bounds.len() - 1,
        TIMEOUT,
        |rank, comm| -> Result<Cast, ShardError> {
            let range = bounds[rank]..bounds[rank + 1];
            let shard = FlatShard::new(shape, element(recipe), range.clone())?;
            let targets = flat_targets(&cpu, &recipe, &shard, Usage::BOTH)?;
            let source = Source::F32(cpu.upload(&x[range.clone()])?);
            let mut book = ScaleBookBuilder::default();
            let item = CastItem::flat(
                &recipe,
                shape,
                range.clone(),
                source,
                targets.clone(),
                &mut book,
            );
            let slot = item.slots[0];
            let book = book.build(&cpu)?;
            let cast = CastPlan::new(&cpu, &book, &[item])?;
            match (scale, slot) {
                (Some(scale), Some(slot)) => {
                    book.set_scale(slot, scale)?;
                    cast.run(&book, &*comm)?;
                }
                _ => cast.calibrate(&book, &*comm)?,
            }
            targets
                .into_iter()
                .map(|t| Ok((t.clone(), cpu.download(&t.bytes)?)))
                .collect()
        },
    )
    .unwrap_or_else(|e| panic!("{e}"))
}

/// The recipe called `name`, with E4M3 codes where it has the choice.
fn recipe(name: &str) -> AnyRecipe {
    let e4m3 = RecipeOptions::default().with("format", Fp8Format::E4M3);
    AnyRecipe::from_name(name, &e4m3)
        .or_else(|_| AnyRecipe::from_name(name, &RecipeOptions::default()))
        .expect("a recipe")
}

/// The codes of weights, the same in both orientations.
fn element(recipe: AnyRecipe) -> Code {
    let [row, col] = kernels(&recipe).map(|key| key.element);
    assert_eq!(row, col);
    row
}

fn check_scales(
    golden: &Golden,
    prefix: &str,
    shape: Shape,
    (target, bytes): &(Target<Cpu>, Vec<u8>),
    compared: &mut Names,
) {
    if target.spec.key.part.is_outer() {
        let value = f32::from_le_bytes(bytes[..].try_into().expect("one f32"));
        for name in ["scale_inv", "reduced_amax_amax"].map(|n| format!("{prefix}.{n}")) {
            if golden.has(&name) {
                assert_eq!(
                    first_difference(&[value], &golden.f32(&name)),
                    None,
                    "{name}"
                );
                compared.insert(name);
                return;
            }
        }
        return;
    }
    for o in Orientation::ALL {
        let name = format!("{prefix}.{o}_scale_inv");
        if !target.spec.key.usage.contains(o.usage()) || !golden.has(&name) {
            continue;
        }
        let layout = |form| ScaleLayout::new(&target.spec, shape, o, form).expect("a form");
        let (from, to) = (layout(Form::Compact), layout(Form::Padded));
        let mut padded = vec![0; to.bytes()];
        let size = target.spec.code.bytes(1);
        for i in 0..to.entries()[0] {
            for j in 0..to.entries()[1] {
                let (at, from) = (to.offset(i, j) * size, to.source(&from, i, j) * size);
                padded[at..at + size].copy_from_slice(&bytes[from..from + size]);
            }
        }
        assert_eq!(padded, golden.bytes(&name), "{name}");
        compared.insert(name);
    }
}

#[test]
fn any_split_casts_to_the_full_bytes() {
    for file in ["partial_32x64", "partial_64x96"] {
        let golden = Golden::open(file);
        let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
        for case @ (prefix, name, ..) in CASES {
            let mut compared = Names::new();
            let given = prefix == "delayed";
            let recipe = recipe(name);
            let scale = given.then(|| golden.number("delayed_scale") as f32);
            let ranks = cast_on_ranks(recipe, &golden, scale);
            for (rank, cast) in ranks.iter().enumerate() {
                for entry @ (target, bytes) in cast {
                    if target.spec.key.part != Part::Data {
                        check_scales(&golden, prefix, shape, entry, &mut compared);
                        continue;
                    }
                    assert_eq!(target.spec.axes, [Axis::Rows, Axis::Cols]);
                    for o in target.spec.key.usage.orientations() {
                        let part = format!("{prefix}.rank{rank}.{o}");
                        if golden.has(&part) {
                            let mask = format!("{prefix}.rank{rank}.mask");
                            // Half bytes have a mask of what a rank owns.
                            let halves = target.spec.code.bits() < 8;
                            let mask = halves.then(|| golden.bytes(&mask));
                            let owned = |i: usize, b: u8| b & mask.map_or(0xFF, |m| m[i]);
                            let expected = golden.bytes(&part);
                            assert_eq!(bytes.len(), expected.len(), "{part}");
                            for i in 0..bytes.len() {
                                assert_eq!(owned(i, bytes[i]), owned(i, expected[i]), "{part} {i}");
                                assert_eq!(bytes[i] & !owned(i, 0xFF), 0, "{part}: not owned");
                            }
                            compared.insert(part);
                        }
                    }
                }
            }
            check_merge(&golden, prefix, recipe, &ranks, &mut compared);
            check_amaxes(&golden, prefix, recipe);
            assert_eq!(compared, required(case, ranks.len()), "{file}");
        }
        assert_eq!(golden.unread(), [""; 0], "{file}");
    }
}

/// The amaxes of the tensor and its blocks, of each rank's part and of all of it; and where the bytes of a part begin.
fn check_amaxes(golden: &Golden, prefix: &str, recipe: AnyRecipe) {
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let (x, bounds) = (golden.f32("x"), golden.usize("bounds"));
    let [row, col] = kernels(&recipe).map(|key| key.block);
    let ranks = bounds.windows(2).map(|w| w[0]..w[1]).enumerate();
    let mut parts = vec![("reduced_amax".to_owned(), 0..x.len())];
    parts.extend(
        ranks
            .clone()
            .map(|(rank, range)| (format!("rank{rank}.local_amax"), range)),
    );
    for (part, range) in parts {
        let named = [("amax", None), ("block", row), ("row", row), ("col", col)];
        for (what, block) in named {
            let name = format!("{prefix}.{part}_{what}");
            if !golden.has(&name) {
                continue;
            }
            let expected = golden.f32(&name);
            let out = Cpu.alloc::<f32>(expected.len()).expect("room");
            let source = Cpu.upload(&x[range.clone()]).expect("room");
            let job = AmaxJob {
                shape,
                start: range.start,
                source: Source::F32(source),
                source_rounding: SourceRounding::F32,
                out: out.clone(),
                tensor: block.is_none().then_some(0),
                blocks: block
                    .map(|block| BlockAmax { block, start: 0 })
                    .into_iter()
                    .collect(),
                hadamard: false,
            };
            Cpu.once(Work::Amax(vec![job])).expect("amaxes");
            let found = Cpu.download(&out).expect("amaxes");
            assert_eq!(first_difference(&found, &expected), None, "{name}");
        }
    }
    for (rank, range) in ranks {
        let name = format!("{prefix}.rank{rank}.byte_start");
        if golden.has(&name) {
            let shard = FlatShard::new(shape, element(recipe), range).expect("a range");
            assert_eq!(golden.usize(&name), [shard.bytes().start], "{name}");
        }
    }
}

/// Full weights on every rank, gathered over the golden cuts.
#[test]
fn every_rank_has_the_full_bytes() {
    for file in ["partial_32x64", "partial_64x96"] {
        let golden = Golden::open(file);
        let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
        let (x, bounds) = (golden.f32("x"), golden.usize("bounds"));
        for (prefix, name, orientations, _) in CASES {
            let recipe = recipe(name);
            let ranks = run_ranks(&Cpu, bounds.len() - 1, TIMEOUT, |rank, comm| {
                let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, bytes| {
                    Ok::<_, ShardError>(Cpu.alloc::<u8>(bytes)?)
                })?;
                let source = Source::F32(Cpu.upload(&x[bounds[rank]..bounds[rank + 1]])?);
                let mut book = ScaleBookBuilder::default();
                let param = FlatParam::new(&Cpu, &tensor, bounds[rank], source, &mut book)?;
                let slot = param.item().slots[0];
                let book = book.build(&Cpu)?;
                let flat = FlatWeights::new(&Cpu, &comm, &book, &[param])?;
                match slot {
                    Some(slot) if prefix == "delayed" => {
                        book.set_scale(slot, golden.number("delayed_scale") as f32)?;
                        flat.run(&book)?;
                    }
                    _ => {
                        flat.calibrate(&book)?;
                        flat.after_cast().run()?;
                    }
                }
                for orientation in orientations {
                    let o = match *orientation {
                        "rowwise" => Orientation::Rowwise,
                        _ => Orientation::Columnwise,
                    };
                    let found = Cpu.download(&tensor.data(o)?.storage)?;
                    let name = format!("{prefix}.full_{orientation}_data");
                    assert_eq!(found, golden.bytes(&name), "{name} on rank {rank}");
                }
                Ok::<_, ShardError>(())
            });
            ranks.unwrap_or_else(|e| panic!("{file} {name}: {e}"));
        }
    }
}

fn check_merge(
    golden: &Golden,
    prefix: &str,
    recipe: AnyRecipe,
    ranks: &[Cast],
    compared: &mut Names,
) {
    let bounds = golden.usize("bounds");
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let code = element(recipe);
    let shards: Vec<FlatShard> = bounds
        .windows(2)
        .map(|w| FlatShard::new(shape, code, w[0]..w[1]).expect("a range"))
        .collect();
    for (index, (target, _)) in ranks[0].iter().enumerate() {
        if target.spec.key.part != Part::Data {
            continue;
        }
        let pieces: Vec<&[u8]> = ranks.iter().map(|cast| &cast[index].1[..]).collect();
        let merged = FlatShard::merge(&shards, &pieces).expect("a tiling");
        for o in target.spec.key.usage.orientations() {
            let name = format!("{prefix}.full_{o}_data");
            if golden.has(&name) {
                assert_eq!(merged, golden.bytes(&name), "{name}");
                compared.insert(name);
            }
        }
    }
}
