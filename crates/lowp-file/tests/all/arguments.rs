//! Wrong arguments: an error of the input with the numbers, and nothing is written.

use crate::common::{SHAPE, plain, quantized, setup, values};
use lowp_file::export::ExportTarget;
use lowp_file::process::{Hooks, set_hooks};
use lowp_file::ranks::shard;
use lowp_file::select::Choices;
use lowp_file::{Export, FileError, Hub, Model, NewModel, Out, Setup, quantize};
use lowp_kernels::Cpu;

/// What `error` says; the input is to blame.
fn message_of(error: FileError) -> String {
    assert!(error.is_input(), "{error:?}");
    error.to_string()
}

/// A file with another delayed scale would not be read again.
#[test]
fn delayed_scales_are_those_that_a_recipe_takes() {
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Hub::open(&plain(folder.path(), "in.safetensors")).expect("a model");
    let values = values();
    let no_scale = "is not a valid scale; give a positive finite number from 3e-39 to 3.4e38";
    for (recipe, scale, message) in [
        ("mxfp8", 1.0, "mxfp8 has no delayed scale"),
        ("fp8-delayed", 0.0, no_scale),
        ("fp8-delayed", -1.0, no_scale),
        ("fp8-delayed", f32::NAN, no_scale),
        ("fp8-delayed", f32::INFINITY, no_scale),
        ("fp8-delayed", 1e-45, no_scale),
    ] {
        let setup = Setup {
            delayed_scale: Some(scale),
            ..setup(recipe)
        };
        let mut new = NewModel::default();
        let error = new.quantize("w", &SHAPE, &values, setup);
        let error = message_of(error.map(drop).expect_err(message));
        assert!(error.contains(message), "{error}");
        let error = Choices::new(&hub.model, &setup, |_| true);
        let error = message_of(error.map(drop).expect_err(message));
        assert!(error.contains(message), "{error}");
    }
    let setup = Setup {
        delayed_scale: Some(0.125),
        ..setup("fp8-delayed")
    };
    let path = folder.path().join("q.safetensors");
    let mut new = NewModel::default();
    new.quantize("w", &SHAPE, &values, setup).expect("a tensor");
    new.write(&path).expect("a file");
    let decoded = Model::open(&path).and_then(|model| model.decode("w"));
    assert_eq!(decoded.expect("values").len(), values.len());
}

#[test]
fn a_shape_that_a_recipe_cannot_take_has_a_name() {
    let (values, setup) = (vec![0.0; 96], setup("mxfp8"));
    for shape in [&[96][..], &[3, 31], &[usize::MAX, 96]] {
        let mut new = NewModel::default();
        let error = new.quantize("layer.w", shape, &values, setup);
        let error = message_of(error.map(drop).expect_err("no matrix of it"));
        assert!(error.starts_with("'layer.w': "), "{error}");
    }
}

#[test]
fn groups_are_of_tensors_that_there_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Hub::open(&plain(folder.path(), "in.safetensors")).expect("a model");
    let of = |recipe: &str, groups: &[Vec<usize>]| {
        let mut choices = Choices::new(&hub.model, &setup(recipe), |_| true).expect("choices");
        choices.group(groups)
    };
    of("nvfp4-2d", &[vec![0, 1]]).expect("a group");
    of("mxfp8", &[]).expect("no groups");
    for (recipe, groups, message) in [
        (
            "mxfp8",
            vec![vec![0, 1]],
            "no scale of mxfp8 depends on the amax of a whole tensor",
        ),
        ("nvfp4-2d", vec![vec![]], "a group of 0 tensors"),
        ("nvfp4-2d", vec![vec![1]], "a group of 1 tensors"),
        (
            "nvfp4-2d",
            vec![vec![0, 2]],
            "a group has tensor 2, and there are 2",
        ),
        (
            "nvfp4-2d",
            vec![vec![0, 0]],
            "tensor 0 is in two groups, or twice in one",
        ),
        (
            "nvfp4-2d",
            vec![vec![0, 1], vec![1, 0]],
            "tensor 1 is in two groups",
        ),
    ] {
        let error = message_of(of(recipe, &groups).expect_err(message));
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn groups_of_an_export_are_of_tensors_that_there_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Hub::open(&quantized(folder.path(), "nvfp4-2d")).expect("a model");
    let export = Export::of_model(&hub, ExportTarget::CompressedTensors).expect("an export");
    assert_eq!(export.scaled().len(), 2);
    assert_eq!(export.first_unlike(&[vec![0, 1]]).expect("numbers"), None);
    for (groups, message) in [
        (vec![vec![]], "a group of 0 tensors"),
        (vec![vec![0, 2]], "a group has tensor 2, and there are 2"),
    ] {
        let error = message_of(export.first_unlike(&groups).expect_err(message));
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_number_of_ranks_is_one_that_is_read_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let hub = Hub::open(&plain(folder.path(), "in.safetensors")).expect("a model");
    let choices = Choices::new(&hub.model, &setup("mxfp8"), |_| true).expect("choices");
    let output = folder.path().join("ranks");
    for world in [0, 1025, usize::MAX] {
        let error = message_of(shard(&hub, &choices, world, &output, &()).expect_err("no ranks"));
        assert_eq!(
            error,
            format!("{world} ranks; give a number from 1 to 1024")
        );
        assert!(!output.exists());
    }
}

/// Choices are made of one model: another one has other tensors.
#[test]
fn choices_of_another_model_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let [hub, other] = ["in.safetensors", "other.safetensors"]
        .map(|name| Hub::open(&plain(folder.path(), name)).expect("a model"));
    let choices = Choices::new(&other.model, &setup("mxfp8"), |_| true).expect("choices");
    let output = folder.path().join("out");
    let error = shard(&hub, &choices, 2, &output, &()).expect_err("another model");
    let error = message_of(error);
    assert!(
        error.contains("the choices are those of another model"),
        "{error}"
    );
    assert!(error.contains("other.safetensors"), "{error}");
    let out = Out::file(&output, []).expect("a place");
    let error = quantize(&Cpu, &hub, &choices, None, out, &()).expect_err("another model");
    let error = message_of(error);
    assert!(
        error.contains("the choices are those of another model"),
        "{error}"
    );
    assert!(!output.exists());
}

#[test]
fn hooks_are_set_once() {
    let hooks = Hooks {
        before_temporary: || Ok(()),
        before_map: || {},
        after_free: || {},
    };
    assert!(set_hooks(hooks));
    assert!(!set_hooks(hooks));
}
