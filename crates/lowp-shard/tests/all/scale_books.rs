//! A scale book goes with the casts that were registered in it: any other one is an error on every
//! rank, before anything is cast.

use crate::common::{Comm, failing, ranks, values};
use lowp_comm::LocalComm;
use lowp_format::{
    AnyRecipe, Code, QuantizedTensor, Recipe, RecipeOptions, Role, ScaleRule, Shape, Usage,
};
use lowp_kernels::{Backend, Cpu, CpuBuffer, Source};
use lowp_shard::{
    CastItem, CastPlan, FlatShard, ScaleBook, ScaleBookBuilder, ShardError, flat_targets,
};

const SHAPE: Shape = Shape::new(64, 32);

type Tensor = QuantizedTensor<CpuBuffer<u8>>;

fn tensor(recipe: AnyRecipe) -> Result<Tensor, ShardError> {
    QuantizedTensor::new(recipe, SHAPE, Usage::BOTH, |_, bytes| {
        Ok(Cpu.alloc::<u8>(bytes)?)
    })
}

fn source() -> Result<Source<Cpu>, ShardError> {
    Ok(Source::F32(Cpu.upload(&values(1, SHAPE.elements()))?))
}

/// A cast of one tensor, its book, and the tensor.
fn cast(recipe: AnyRecipe) -> Result<(CastPlan<Cpu>, ScaleBook<Cpu>, Tensor), ShardError> {
    let tensor = tensor(recipe)?;
    let mut book = ScaleBookBuilder::default();
    let item = CastItem::rows(&tensor, source()?, &mut book);
    let book = book.build(&Cpu)?;
    Ok((CastPlan::new(&Cpu, &book, &[item])?, book, tensor))
}

fn bytes(tensor: &Tensor) -> Result<Vec<Vec<u8>>, ShardError> {
    let bytes = tensor.buffers().iter().map(|b| Cpu.download(&b.storage));
    Ok(bytes.collect::<Result<_, _>>()?)
}

#[test]
fn another_book_is_an_error_on_every_rank() {
    let run = |cast: &CastPlan<Cpu>, book: &ScaleBook<Cpu>, comm: &Comm, first: bool| {
        if first {
            cast.calibrate(book, &**comm)
        } else {
            cast.run(book, &**comm)
        }
    };
    for recipe in AnyRecipe::all() {
        for (first, empty, all) in [
            (true, true, true),
            (false, true, false),
            (true, false, false),
            (false, false, true),
        ] {
            let failed = failing(3, |rank, comm| {
                let (cast, own, tensor) = self::cast(recipe)?;
                let mut other = ScaleBookBuilder::default();
                if !empty {
                    other.register(&recipe, SHAPE, Usage::BOTH);
                }
                let other = other.build(&Cpu)?;
                let before = bytes(&tensor)?;
                let book = if all || rank == 1 { &other } else { &own };
                let result = run(&cast, book, &comm, first);
                if all || rank == 1 {
                    assert!(bytes(&tensor)? == before, "something was cast");
                }
                // A rank whose part was done, because nothing is agreed on, hears of it here.
                let later = comm.control().barrier().expect_err("the world has failed");
                result.and(Err::<(), _>(later.into()))
            });
            let text = failed.cause.to_string();
            assert!(text.contains("another ScaleBook"), "{text}");
            for (rank, result) in failed.others {
                assert!(result.is_err(), "rank {rank}");
            }
        }
    }
}

/// Alone, the right book can be given after the wrong one.
#[test]
fn a_world_of_one_may_try_again() {
    for recipe in AnyRecipe::all() {
        let (cast, book, _) = cast(recipe).expect("a cast");
        let comm = LocalComm::solo(&Cpu);
        let other = ScaleBookBuilder::default().build(&Cpu).expect("a book");
        cast.run(&other, &comm).expect_err("another book");
        cast.run(&book, &comm).expect("its own book");
    }
}

/// An entry means nothing in another book, though its number is there.
#[test]
fn an_item_of_another_builder_is_rejected() {
    for recipe in AnyRecipe::all() {
        let (mut one, mut two) = (ScaleBookBuilder::default(), ScaleBookBuilder::default());
        let tensors = [(); 2].map(|()| tensor(recipe).expect("a tensor"));
        let source = || source().expect("room");
        let items = [
            CastItem::rows(&tensors[0], source(), &mut one),
            CastItem::rows(&tensors[1], source(), &mut two),
        ];
        let books = [one, two].map(|b| b.build(&Cpu).expect("a book"));
        let kernels = recipe.quantizers(Role::Weight).kernels();
        let observes = kernels.iter().any(|kernel| kernel.scale.outer().is_some());
        for book in &books {
            let planned = CastPlan::new(&Cpu, book, &items);
            match planned {
                Ok(_) => assert!(!observes, "{}", recipe.name()),
                Err(error) => {
                    assert!(observes, "{}: {error}", recipe.name());
                    assert!(error.to_string().contains("another ScaleBook"), "{error}");
                }
            }
        }
    }
}

/// Reserved block amaxes are entries too.
#[test]
fn a_flat_item_of_another_builder_is_rejected() {
    let mut rejected = 0;
    for recipe in AnyRecipe::all() {
        let shard = FlatShard::new(SHAPE, Code::F32, 0..SHAPE.elements());
        let targets = flat_targets(&Cpu, &recipe, &shard.expect("a shard"), Usage::ROWWISE);
        let targets = targets.expect("targets");
        let (mut own, mut other) = (ScaleBookBuilder::default(), ScaleBookBuilder::default());
        let whole = 0..SHAPE.elements();
        let item = |book: &mut ScaleBookBuilder| {
            let source = source().expect("room");
            CastItem::flat(&recipe, SHAPE, whole.clone(), source, targets.clone(), book)
        };
        let (items, _) = ([item(&mut own)], item(&mut other));
        let [own, other] = [own, other].map(|b| b.build(&Cpu).expect("a book"));
        CastPlan::new(&Cpu, &own, &items).expect("its own book");
        let planned = CastPlan::new(&Cpu, &other, &items);
        let kernels = recipe.quantizers(Role::Weight).kernels();
        let scaled = kernels.iter().any(|kernel| kernel.scale != ScaleRule::None);
        assert_eq!(planned.is_err(), scaled, "{}", recipe.name());
        rejected += usize::from(scaled);
    }
    assert!(rejected >= 11, "{rejected} recipes with scales");
}

/// Sound books pass on ranks that share one tensor's rows.
#[test]
fn its_own_book_passes() {
    for recipe in AnyRecipe::all() {
        ranks(3, |_, comm| {
            let (cast, book, _) = cast(recipe)?;
            cast.calibrate(&book, &*comm)?;
            cast.run(&book, &*comm)
        });
    }
}

/// One scale is that of the list, whatever it follows from; entries of another book have none.
#[test]
fn the_scale_of_an_entry_is_that_of_the_list() {
    let mut book = ScaleBookBuilder::default();
    for recipe in AnyRecipe::all() {
        book.register(&recipe, SHAPE, Usage::BOTH);
    }
    let book = book.build(&Cpu).expect("a book");
    let tensors = book.scales().expect("scales").len();
    let index = |slot| book.index(slot).expect("an entry");
    for slot in book.slots() {
        let known = 1.5 + index(slot) as f32;
        if index(slot) < tensors {
            book.set_scale(slot, known).expect("an entry");
        }
        Cpu.write(book.observed(), index(slot), &[-10.0 * known])
            .expect("an amax");
    }
    let scales = book.scales().expect("scales");
    let distinct = scales.iter().enumerate();
    let distinct = distinct.filter(|(i, scale)| !scales[..*i].contains(scale));
    assert!(distinct.count() > 2, "{scales:?}");
    let mut lines = 0;
    for slot in book.slots() {
        match scales.get(index(slot)) {
            Some(&scale) => assert_eq!(book.scale(slot), Ok(scale)),
            // Of lines, the first: 448 to its amax, or the amax itself.
            None => {
                let amax = 10.0 * (1.5 + index(slot) as f32);
                let scale = book.scale(slot).expect("a scale");
                assert!(scale == 448.0 / amax || scale == amax, "{scale}");
                lines += 1;
            }
        }
    }
    assert!(lines > 0);
    let mut other = ScaleBookBuilder::default();
    let mut register = |r: &AnyRecipe| other.register(r, SHAPE, Usage::BOTH)[0];
    let foreign = AnyRecipe::all().iter().find_map(&mut register);
    let foreign = foreign.expect("an entry");
    let rejected = book.scale(foreign);
    assert!(
        matches!(rejected, Err(ShardError::OtherBook { .. })),
        "{rejected:?}"
    );
}

/// An operand that no product reads quantized has no entry, whatever its scales depend on.
#[test]
fn an_operand_of_no_usage_registers_nothing() {
    for recipe in AnyRecipe::all() {
        for role in Role::ALL {
            let (quantizers, shape) = (recipe.quantizers(role), Shape::new(64, 64));
            let mut book = ScaleBookBuilder::default();
            let none = Usage::empty();
            assert_eq!(book.register_operand(&quantizers, shape, none), [None; 2]);
            let book = book.build(&Cpu).expect("an empty book");
            assert_eq!(book.slots().len(), 0, "{recipe:?} {role:?}");
        }
    }
}

/// A delayed scale and its history in and out; what fits no entry is an error and replaces nothing.
#[test]
fn states_of_delayed_scales() -> Result<(), ShardError> {
    let options = RecipeOptions::default();
    let [delayed, other] =
        ["fp8-delayed", "mxfp8"].map(|name| AnyRecipe::from_name(name, &options));
    let mut builder = ScaleBookBuilder::default();
    let shape = Shape::new(32, 32);
    let slot = builder.register(&delayed?, shape, Usage::BOTH)[0].expect("a delayed scale");
    assert_eq!(builder.register(&other?, shape, Usage::BOTH), [None; 2]);
    let book = builder.build(&Cpu)?;
    let mut state = book.delayed_state(slot)?.expect("a state");
    state.scale = 4.0;
    state.history[1] = 2.5;
    // That of an infinite value.
    state.history[2] = f32::INFINITY;
    book.set_delayed_state(slot, &state)?;
    assert_eq!(book.delayed_state(slot)?.as_ref(), Some(&state));
    assert_eq!(book.scale(slot)?, 4.0);
    let mut wrong = vec![state.clone(); 5];
    wrong[0].history.pop();
    wrong[1].scale = 0.0;
    wrong[2].scale = f32::NAN;
    wrong[3].history[0] = -1.0;
    wrong[4].history[0] = f32::NAN;
    let texts = [
        "amaxes where",
        "the scale is 0",
        "the scale is NaN",
        "amax 0 of the history is -1",
        "amax 0 of the history is NaN",
    ];
    for (wrong, text) in wrong.iter().zip(texts) {
        let error = book
            .set_delayed_state(slot, wrong)
            .expect_err(text)
            .to_string();
        assert!(error.contains(text), "{error}");
        assert_eq!(book.delayed_state(slot)?.as_ref(), Some(&state));
    }
    let stranger = ScaleBookBuilder::default().build(&Cpu)?;
    assert!(
        stranger.delayed_state(slot).is_err() && stranger.set_delayed_state(slot, &state).is_err()
    );
    Ok(())
}

/// Weights of a group have one entry where their scale is that of the tensor, made by the same rule.
#[test]
fn entries_of_a_group_are_one() {
    for recipe in AnyRecipe::low_precision() {
        let mut book = ScaleBookBuilder::default();
        let mut register = |group, recipe: AnyRecipe| {
            book.group(group);
            book.register(&recipe, SHAPE, Usage::BOTH)
        };
        let alone = register(None, recipe);
        let [first, second] = [(); 2].map(|()| register(Some(1), recipe));
        let other = register(Some(2), recipe);
        let plain = register(Some(1), AnyRecipe::all()[0]);
        let kernels = recipe.quantizers(Role::Weight).kernels();
        for (at, key) in kernels.iter().enumerate() {
            let of_tensor = matches!(key.scale.outer(), Some((lowp_format::Extent::Tensor, _)));
            assert_eq!(first[at].is_some(), key.scale.outer().is_some());
            let Some(slot) = first[at] else { continue };
            assert_eq!(second[at] == Some(slot), of_tensor, "{}", recipe.name());
            for apart in [alone, other] {
                assert!(apart[at].is_some() && apart[at] != Some(slot));
            }
            assert_ne!(plain[at], Some(slot));
        }
    }
}
