//! Golden vectors of sharded gathers: the full tensors that TransformerEngine rebuilds in each
//! phase, and what travels where its contract and ours are the same.

use lowp_comm::run_ranks;
use lowp_format::{
    AnyRecipe, Form, Fp8Format, GatherStep, Orientation, Part, Phase, QuantizedTensor,
    RecipeOptions, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    CastItem, CastPlan, GatherGroup, GatherPool, ScaleBookBuilder, ShardError, ShardSpec,
    ShardedTensor, scales_in_form,
};
use lowp_tests::golden::Golden;
use lowp_tests::spy::{Call, Spy};
use lowp_tests::world::{TIMEOUT, orientation};

/// The recipe of a golden name.
fn recipe(golden: &str) -> AnyRecipe {
    let e4m3 = RecipeOptions::default().with("format", Fp8Format::E4M3);
    let (name, options) = match golden {
        "current" => ("fp8-current", e4m3),
        "mxfp8" => ("mxfp8", e4m3),
        "nvfp4_2d" => ("nvfp4-2d", RecipeOptions::default()),
        "block2d" => ("fp8-block", e4m3),
        _ => panic!("{golden}: a new golden file; say here which recipe it is"),
    };
    AnyRecipe::from_name(name, &options).expect("a recipe")
}

/// Golden names of the parts that a full tensor has, with their bytes.
type Parts = Vec<(String, Vec<u8>)>;

/// The parts of `tensor`, scales in the Padded form that TE stores.
fn parts(tensor: &QuantizedTensor<CpuBuffer<u8>>) -> Result<Parts, ShardError> {
    let mut parts = Parts::new();
    for o in tensor.usage().orientations() {
        let data = tensor.data(o)?;
        parts.push((format!("{o}_data"), Cpu.download(&data.storage)?));
        if let Some((_, padded)) = scales_in_form(&Cpu, tensor, o, Form::Padded)? {
            parts.push((format!("{o}_scale_inv"), padded));
        }
    }
    for (part, name) in [(Part::Amax, "amax"), (Part::DecodeScale, "scale_inv")] {
        if let Some(number) = tensor.part(Orientation::Rowwise, part) {
            parts.push((name.to_owned(), Cpu.download(&number.storage)?));
        }
    }
    Ok(parts)
}

/// What one rank saw of one phase.
struct Seen {
    usage: Usage,
    parts: Parts,
    sent: Vec<Piece>,
}

/// What one rank sent of one buffer.
struct Piece {
    part: Part,
    entries: [usize; 2],
    bytes: Vec<u8>,
}

/// Every rank casts its own rows, agrees on amaxes and gathers both phases.
fn gather(golden: &Golden, recipe: AnyRecipe, reshard: bool) -> Vec<[Seen; 2]> {
    let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
    let x = golden.f32("x");
    let world = golden.number("world") as usize;
    let run = run_ranks(&Cpu, world, TIMEOUT, |rank, comm| {
        let spec = ShardSpec::new(&recipe, shape, world, rank)?;
        let source = Source::F32(Cpu.upload(&x[spec.elements()])?);
        let shard = ShardedTensor::new(&Cpu, recipe, spec)?;
        let mut book = ScaleBookBuilder::default();
        let item = CastItem::rows(shard.local(), source, &mut book);
        let book = book.build(&Cpu)?;
        CastPlan::new(&Cpu, &book, &[item])?.run(&book, &*comm)?;
        let spy = Spy::new(comm);
        let pool = GatherPool::new(&Cpu);
        let mut group = GatherGroup::new(&Cpu, spy.clone(), &pool, vec![shard], reshard)?;
        let mut phase = |phase| -> Result<Seen, ShardError> {
            spy.take();
            group.unshard(phase)?;
            let tensor = group.tensor(0)?;
            let (usage, parts) = (tensor.usage(), parts(tensor)?);
            let plan = group.plan(0, phase).expect("a phase that was gathered");
            let sends = |step: &&GatherStep| matches!(step, GatherStep::Concat { .. });
            let steps = plan.steps.iter().filter(sends);
            let pieces = spy.take().into_iter().flat_map(|call| match call {
                Call::AllGather(pieces) => pieces,
                call => panic!("{call:?} in a gather"),
            });
            let local = group.params()[0].spec().local_shape();
            // Pieces that travel in a message follow each other there, in the order of the plan.
            let mut bytes = pieces.flatten();
            let piece = |step: &GatherStep| Piece {
                part: step.spec().key.part,
                entries: step.spec().entries(local),
                bytes: bytes.by_ref().take(step.piece(rank).unwrap_or(0)).collect(),
            };
            let sent: Vec<Piece> = steps.map(piece).collect();
            group.reshard();
            Ok(Seen { usage, parts, sent })
        };
        Ok::<_, ShardError>([phase(Phase::Forward)?, phase(Phase::Backward)?])
    });
    run.unwrap_or_else(|e| panic!("{e}"))
}

/// Compares the parts that `seen` has with the golden `<prefix>.full.*`; returns their names.
fn compare_full(golden: &Golden, prefix: &str, seen: &Seen) -> Vec<String> {
    let mut compared = Vec::new();
    for (part, found) in &seen.parts {
        let name = format!("{prefix}.full.{part}");
        if golden.has(&name) {
            let expected = golden.bytes(&name);
            let at = found.iter().zip(expected).position(|(a, b)| a != b);
            assert_eq!(at, None, "{name}: first different byte");
            assert_eq!(found.len(), expected.len(), "{name}: bytes");
            compared.push(name);
        }
    }
    compared
}

/// Compares what a rank sent with the golden wire buffers, which lie in the same order. Data are
/// the same bytes. Of scales TE sends the inner axis padded, and 2-D ones once per row; ours have
/// one entry per block.
fn compare_wire(golden: &Golden, prefix: &str, rank: usize, sent: &[Piece]) {
    for (index, piece) in sent.iter().enumerate() {
        let name = format!("{prefix}.rank{rank}.wire{index}");
        let expected = golden.bytes(&name);
        if piece.part == Part::Data {
            assert!(piece.bytes == expected, "{name}");
            continue;
        }
        let (shape, [rows, cols]) = (golden.shape(&name), piece.entries);
        let (repeat, width) = (shape[0] / rows, shape[1]);
        assert_eq!(repeat * rows, shape[0], "{name}: {shape:?}");
        for (i, j) in (0..rows).flat_map(|i| (0..cols).map(move |j| (i, j))) {
            let bytes = piece.bytes.len() / (rows * cols);
            let entry = |of: &[u8], at: usize| of[at * bytes..][..bytes].to_vec();
            let [found, expected] = [
                entry(&piece.bytes, i * cols + j),
                entry(expected, i * repeat * width + j),
            ];
            assert_eq!(found, expected, "{name} at {i}, {j}");
        }
    }
    let more = format!("{prefix}.rank{rank}.wire{}", sent.len());
    assert!(!golden.has(&more), "{more} was not sent");
}

fn check(file: &str) {
    let golden = Golden::open(file);
    let recipe = recipe(
        file.trim_start_matches("fsdp_")
            .rsplitn(3, '_')
            .last()
            .expect("fsdp_<recipe>_<shape>_w<world>"),
    );
    let mut compared = Vec::new();
    for (reshard, prefixes) in [(true, ["fwd", "bwd"]), (false, ["noreshard"; 2])] {
        for (rank, seen) in gather(&golden, recipe, reshard).iter().enumerate() {
            for phase in Phase::ALL {
                let (seen, prefix) = (&seen[phase as usize], prefixes[phase as usize]);
                let needed = orientation(phase).usage();
                assert!(seen.usage.contains(needed), "{file} {prefix}");
                compared.extend(compare_full(&golden, prefix, seen));
            }
            // TE derives both usages of some recipes in either phase; ours come with the phase
            // that needs them, and must be the same bytes.
            for prefix in prefixes {
                for seen in seen {
                    compared.extend(compare_full(&golden, prefix, seen));
                }
            }
            if reshard {
                compare_wire(&golden, "fwd", rank, &seen[0].sent);
                compare_wire(&golden, "bwd", rank, &seen[1].sent);
            } else {
                compare_wire(&golden, "noreshard", rank, &seen[0].sent);
                assert_eq!(seen[1].sent.len(), 0, "{file}: backward sent again");
            }
        }
    }
    let full = golden
        .tensors()
        .into_iter()
        .filter(|n| n.contains(".full."));
    for name in full {
        assert!(compared.contains(&name), "{file}: {name} was not compared");
    }
    assert_eq!(golden.unread(), [""; 0], "{file}");
}

#[test]
fn every_phase_and_policy() {
    let files = Golden::names()
        .into_iter()
        .filter(|n| n.starts_with("fsdp_"));
    let files: Vec<String> = files.collect();
    assert_eq!(files.len(), 4, "{files:?}");
    files.iter().for_each(|file| check(file));
}
