//! Gathers that another library does, through the hooks: what is used again, what is planned again, and what is rejected.

use std::cell::RefCell;

use crate::fsdp::{Fsdp, Full, One, Param, Shard, content, memory, whole};
use lowp_comm::CommError;
use lowp_format::{AnyRecipe, FormatError, Origin, Phase, Recipe, RowCuts, Shape, Usage};
use lowp_kernels::{Backend, Cpu, CpuBuffer, KernelError};
use lowp_shard::{GatherHooks, ShardError, ShardSpec, bucket_bytes};

/// Memory that is freed and allocated again may lie elsewhere: work is planned anew, unless it lies where it lay before.
#[test]
fn memory_may_move() {
    for name in ["fp8-current", "nvfp4-1d"] {
        let mut one = One::new(name, Phase::Backward);
        let (sent, mut full) = one.full(1);
        let mut places = vec![one.arrived.clone()];
        places.extend((0..2).map(|_| memory(sent.hooks())));
        for (seed, (keep, place, planned)) in (2..).zip([
            (1, 0, 1),
            (1, 1, 2),
            (1, 0, 3),
            (2, 1, 4),
            (2, 0, 4),
            (2, 1, 4),
            (2, 2, 5),
            (2, 1, 5),
            (2, 0, 6),
            (0, 0, 6),
            (0, 1, 7),
        ]) {
            full.keep_sets(keep);
            one.arrived = places[place].clone();
            let (sent, expected) = one.gather(seed);
            let filled = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full);
            assert_eq!((filled, full.planned()), (Ok(()), planned));
            assert_eq!(content(full.tensor().expect("filled")), expected);
        }
        let (sent, expected) = one.gather(1);
        let short = full.set_memory(&Cpu, |output| Ok(Cpu.alloc(output.bytes - 1)?));
        assert!(
            matches!(short, Err(ShardError::Comm(CommError::ItemLength { .. }))),
            "{short:?}"
        );
        assert!(full.tensor().is_err(), "cast since");
        let memory = RefCell::new(Vec::new());
        let moved = full.set_memory(&Cpu, |output| {
            let buffer = Cpu.alloc(output.bytes)?;
            memory.borrow_mut().push(Cpu.span(&buffer));
            Ok(buffer)
        });
        let memory = memory.into_inner();
        let own = sent.hooks().outputs().iter().filter(|o| o.has_memory());
        assert_eq!((moved, memory.len()), (Ok(()), own.count()));
        assert!(full.tensor().is_err() && full.derive(&Cpu).is_err());
        let filled = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full);
        assert_eq!((filled, full.planned()), (Ok(()), 8));
        let tensor = full.tensor().expect("filled");
        assert_eq!(content(tensor), expected);
        let places: Vec<_> = tensor
            .buffers()
            .iter()
            .map(|b| Cpu.span(&b.storage))
            .collect();
        assert!(!memory.is_empty() && memory.iter().all(|place| places.contains(place)));
        full.set_memory(&Cpu, |output| Ok(Cpu.alloc(output.bytes)?))
            .expect("memory");
        assert!(full.tensor().is_err(), "the memory holds nothing yet");
    }
}

/// Work that is planned can be captured: a graph of a step may hold the gathers of its parameters.
#[test]
fn later_gathers_can_be_captured() {
    let one = One::new("nvfp4-1d", Phase::Backward);
    let (_, mut full) = one.full(1);
    let (sent, expected) = one.gather(2);
    let graph =
        Cpu.capture(|| sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full));
    let graph = graph.expect("nothing is planned");
    assert_ne!(content(full.tensor().expect("said to be filled")), expected);
    Cpu.launch(&graph).expect("launched");
    assert_eq!(content(full.tensor().expect("filled")), expected);
    let elsewhere = memory(sent.hooks());
    let planned =
        Cpu.capture(|| sent.post_all_gather_into(&Cpu, one.shard(), &elsewhere, &mut full));
    assert!(
        matches!(
            planned,
            Err(ShardError::Kernel(KernelError::InCapture { .. }))
        ),
        "{planned:?}"
    );
}

/// What is derived once stays, until the next gather.
#[test]
fn operands_are_derived_once_per_gather() {
    let mut one = One::new("fp8-current", Phase::Forward);
    let hooks = GatherHooks::kept(one.param.recipe, one.shard().spec()).expect("hooks");
    (one.fsdp, one.arrived) = (Fsdp::new(&one.param, &hooks), memory(&hooks));
    let (sent, expected) = one.gather(1);
    let full = sent.post_all_gather(&Cpu, one.shard(), &one.arrived);
    let mut full = full.expect("a full tensor");
    assert_eq!(full.tensor().expect("filled").usage(), Usage::ROWWISE);
    full.derive(&Cpu).expect("derived");
    assert_eq!(content(full.tensor().expect("filled")), expected);
    Cpu.clear(&one.arrived[0]).expect("cleared");
    full.derive(&Cpu).expect("there already");
    let columnwise = content(full.tensor().expect("filled")).swap_remove(1);
    assert_eq!(columnwise, expected[1]);
    let (sent, expected) = one.gather(2);
    let filled = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full);
    assert_eq!((filled, full.planned()), (Ok(()), 1));
    assert_eq!(full.tensor().expect("filled").usage(), Usage::ROWWISE);
    full.derive(&Cpu).expect("derived");
    assert_eq!(content(full.tensor().expect("filled")), expected);
}

#[test]
fn released_tensors_are_filled_again() {
    let one = One::new("fp8-current", Phase::Backward);
    let (_, mut full) = one.full(1);
    let own = Cpu.span(&full.tensor().expect("filled").buffers()[0].storage);
    full.release();
    let error = full.tensor().expect_err("nothing").to_string();
    let text = "fp8-current 96x64 holds nothing: it was released,";
    assert!(error.starts_with(text), "{error}");
    let (sent, expected) = one.gather(2);
    let filled = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full);
    assert_eq!((filled, full.planned()), (Ok(()), 2));
    let tensor = full.tensor().expect("filled");
    assert_eq!(
        (content(tensor), Cpu.span(&tensor.buffers()[0].storage)),
        (expected, own)
    );
}

#[test]
fn what_all_ranks_have_is_the_shards_own_handle_and_never_travels() {
    for (recipe, phase) in AnyRecipe::all()
        .into_iter()
        .flat_map(|r| Phase::ALL.map(|p| (r, p)))
    {
        let param = Param::even(recipe, 96, 2);
        let hooks = GatherHooks::new(recipe, param.shards[1].spec(), phase).expect("hooks");
        let mut origins = hooks.inputs().iter().map(|input| input.spec.origin);
        assert!(origins.all(|origin| origin != Origin::Replicated));
        let (fsdp, arrived) = (Fsdp::new(&param, &hooks), memory(&hooks));
        param.cast(1);
        let sent = fsdp.gather(&arrived).swap_remove(1);
        let mut full = sent
            .post_all_gather(&Cpu, &param.shards[1], &arrived)
            .expect("filled");
        let check = |full: &Full, shard: &Shard| {
            let buffers = full.tensor().expect("filled").buffers().iter();
            let mut replicated = buffers.filter(|b| b.spec.origin == Origin::Replicated);
            let Some(scale) = replicated.next() else {
                return false;
            };
            let own = shard.local().buffer(scale.spec.key).expect("its scale");
            assert!(scale.storage.ptr_eq(&own.storage) && replicated.next().is_none());
            true
        };
        let has = check(&full, &param.shards[1]);
        // The same shard, moved into a bucket: its scale lies elsewhere.
        let bucket = Cpu
            .alloc(bucket_bytes(param.shards[1].local()))
            .expect("room");
        let moved = param.shards[1].move_into(&Cpu, &bucket, 0).expect("moved");
        sent.post_all_gather_into(&Cpu, &moved, &arrived, &mut full)
            .expect("filled");
        assert_eq!(check(&full, &moved), has);
        assert_eq!(full.planned(), if has { 2 } else { 1 });
    }
}

#[test]
fn other_buffers_than_were_sent_are_rejected() {
    let one = One::new("mxfp8", Phase::Forward);
    let (sent, mut full) = one.full(1);
    let fill = |full: &mut Full, arrived: &[CpuBuffer<u8>]| {
        let first = sent.post_all_gather(&Cpu, one.shard(), arrived).map(|_| ());
        let into = sent.post_all_gather_into(&Cpu, one.shard(), arrived, full);
        assert_eq!(first, into);
        into.expect_err("rejected")
    };
    let error = fill(&mut full, &one.arrived[..1]);
    let text = "mxfp8 96x64: 1 buffers were given, but 2 were sent; give the received bytes of every input, in the \
                order of GatherHooks::inputs";
    assert_eq!(error.to_string(), text);
    let mut swapped = one.arrived.clone();
    swapped.reverse();
    let error = fill(&mut full, &swapped);
    let text = "mxfp8 96x64: 256 bytes arrived for rowwise_data and 8192 were sent by 2 ranks, 4096 by each; give the \
                whole output of its all-gather, padding included";
    assert_eq!(error.to_string(), text);
    // Without the padding of the last rank, or with more.
    for more in [-2048isize, 1] {
        let len = Cpu.len(&one.arrived[0]).saturating_add_signed(more);
        let other = [Cpu.alloc(len).expect("room"), one.arrived[1].clone()];
        let error = fill(&mut full, &other);
        assert!(
            matches!(error, ShardError::ArrivedBytes { found, .. } if found == len),
            "{error}"
        );
    }
    // What was there before is untouched.
    let expected = whole(one.param.recipe, one.param.shape, Usage::ROWWISE, 1);
    assert_eq!(content(full.tensor().expect("filled")), expected);
}

#[test]
fn results_and_shards_of_other_gathers_are_rejected() {
    let one = One::new("fp8-current", Phase::Forward);
    let (sent, _) = one.full(1);
    // The same shape and recipe; another phase; another recipe of as many bytes; another shape.
    let mut twin = One::new("fp8-current", Phase::Forward).full(2).1;
    let mut phase = One::new("fp8-current", Phase::Backward).full(2).1;
    let mut recipe = One::new("fp8-delayed", Phase::Forward).full(2).1;
    let others = [
        ("another parameter", &mut twin),
        ("columnwise", &mut phase),
        ("fp8-delayed", &mut recipe),
    ];
    for (says, other) in others {
        let before = content(other.tensor().expect("filled"));
        let error = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, other);
        let error = error.expect_err("belongs to another gather");
        let what = "the full tensor";
        assert!(
            matches!(error, ShardError::OtherGather { what: w, .. } if w == what),
            "{error}"
        );
        let text = error.to_string();
        let (_, found) = text.split_once("and it belongs to").expect("two gathers");
        assert!(found.contains(says), "{text}");
        assert_eq!(content(other.tensor().expect("as before")), before);
    }
    // Shards of another parameter, rank-by-rank alike.
    let stranger = One::new("fp8-current", Phase::Forward);
    let error = sent.post_all_gather(&Cpu, stranger.shard(), &one.arrived);
    let error = error.map(|_| ()).expect_err("another shard");
    assert!(
        matches!(
            error,
            ShardError::OtherGather {
                what: "the shard",
                ..
            }
        ),
        "{error}"
    );
    // Hooks of other shards.
    let hooks = sent.hooks();
    let recipe = one.param.recipe;
    for other in [
        Param::even(recipe, 97, 2),
        Param::even(recipe, 96, 3),
        Param::new(recipe, one.param.cuts.clone(), 32, Usage::BOTH),
        Param::new(recipe, one.param.cuts.clone(), 64, Usage::ROWWISE),
        Param::even(
            AnyRecipe::from_name("fp8-delayed", &Default::default()).expect("a recipe"),
            96,
            2,
        ),
    ] {
        let error = hooks
            .send_buffers(&Cpu, &other.shards[0])
            .map(|_| ())
            .expect_err("another shard");
        assert!(
            matches!(
                error,
                ShardError::OtherGather {
                    what: "the shard",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn casts_make_what_is_on_its_way_and_what_is_there_old() {
    let one = One::new("fp8-current", Phase::Forward);
    let (sent, mut full) = one.full(1);
    one.shard().begin_write();
    let old = |result: Result<(), ShardError>, says: &str| {
        let error = result.expect_err("old");
        assert!(matches!(error, ShardError::GatherAgain { .. }), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    };
    old(
        full.tensor().map(|_| ()),
        "fp8-current 96x64 was cast again since it was gathered",
    );
    old(full.derive(&Cpu), "since it was gathered");
    let first = sent.post_all_gather(&Cpu, one.shard(), &one.arrived);
    old(first.map(|_| ()), "was cast after pre_all_gather");
    let into = sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full);
    old(into, "was cast after pre_all_gather");
    let (sent, expected) = one.gather(3);
    sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full)
        .expect("filled");
    assert_eq!(content(full.tensor().expect("filled")), expected);
}

#[test]
fn a_gather_that_failed_leaves_nothing_to_read() {
    let one = One::new("fp8-current", Phase::Backward);
    let (sent, mut full) = one.full(1);
    // What it is made of lies where it must be made.
    let own = full.tensor().expect("filled").buffers()[0].storage.clone();
    let failed = sent.post_all_gather_into(&Cpu, one.shard(), &[own], &mut full);
    assert!(matches!(failed, Err(ShardError::Kernel(_))), "{failed:?}");
    let error = full.tensor().expect_err("nothing");
    assert!(
        error.to_string().contains("its last gather failed"),
        "{error}"
    );
    sent.post_all_gather_into(&Cpu, one.shard(), &one.arrived, &mut full)
        .expect("filled");
    assert!(full.tensor().is_ok());
}

#[test]
fn shards_serve_only_what_they_were_made_for() {
    for recipe in AnyRecipe::all() {
        let cuts = RowCuts::new(64, 2, recipe.row_quantum(Usage::BOTH)).expect("cuts");
        let spec = ShardSpec::from_cuts(&recipe, Shape::new(64, 64), cuts, 0, Usage::ROWWISE);
        let spec = spec.expect("a shard");
        assert!(GatherHooks::new(recipe, &spec, Phase::Forward).is_ok());
        let missing = |result: Result<GatherHooks, ShardError>| {
            let error = result.expect_err("no such usage");
            assert!(
                matches!(error, ShardError::Format(FormatError::MissingUsage { .. })),
                "{error}"
            );
        };
        missing(GatherHooks::new(recipe, &spec, Phase::Backward));
        missing(GatherHooks::kept(recipe, &spec));
        missing(GatherHooks::phases(recipe, &spec).map(|[forward, _]| forward));
        missing(GatherHooks::with_usage(
            recipe,
            &spec,
            Usage::ROWWISE,
            Usage::BOTH,
        ));
    }
}

#[test]
fn memory_of_other_lengths_is_rejected() {
    let mut one = One::new("fp8-current", Phase::Backward);
    // The second rank's piece is shorter.
    one.param = Param::even(one.param.recipe, 97, 2);
    let spec = one.shard().spec();
    let hooks = GatherHooks::new(one.param.recipe, spec, Phase::Backward).expect("hooks");
    (one.fsdp, one.arrived) = (Fsdp::new(&one.param, &hooks), memory(&hooks));
    let (sent, _) = one.full(1);
    let long = |n: usize| Ok(Cpu.alloc::<u8>(n + 1)?);
    let padded = hooks.send_buffers_with(&Cpu, &one.param.shards[1], |_, n| long(n));
    let full = sent.post_all_gather_with(&Cpu, one.shard(), &one.arrived, |o| long(o.bytes));
    for error in [padded.map(|_| ()).err(), full.map(|_| ()).err()] {
        assert!(
            matches!(error, Some(ShardError::Comm(CommError::ItemLength { .. }))),
            "{error:?}"
        );
    }
    // A shard over buffers that are too short.
    let spec = one.shard().spec().clone();
    let shard = Shard::with_alloc(one.param.recipe, spec, |_, n| Ok(Cpu.alloc(n / 2)?));
    let error = hooks
        .send_buffers(&Cpu, &shard.expect("a shard"))
        .map(|_| ())
        .err();
    assert!(
        matches!(error, Some(ShardError::Comm(CommError::ItemLength { .. }))),
        "{error:?}"
    );
}

/// Plain data tells gathers apart: ranks that planned different things, parts of different gathers.
#[test]
fn hooks_are_equal_where_ranks_plan_the_same() {
    let one = One::new("mxfp8", Phase::Forward);
    let recipe = one.param.recipe;
    let hooks = |rank: usize, phase| {
        let spec = one.param.shards[rank].spec();
        GatherHooks::new(recipe, spec, phase).expect("hooks")
    };
    let [first, second] = [0, 1].map(|rank| hooks(rank, Phase::Forward));
    assert_eq!((&first, first.text()), (&second, second.text()));
    assert_ne!(first, hooks(0, Phase::Backward));
    let kept = GatherHooks::kept(recipe, one.shard().spec()).expect("hooks");
    let both = GatherHooks::with_usage(recipe, one.shard().spec(), Usage::BOTH, Usage::BOTH);
    assert_ne!(kept, both.expect("hooks"));
    let (sent, _) = one.gather(1);
    let again = one.fsdp.gather(&one.arrived);
    assert_eq!(sent, again[0]);
    assert_ne!(sent, again[1]);
    one.shard().begin_write();
    assert_ne!(sent, one.fsdp.gather(&one.arrived)[0]);
}
