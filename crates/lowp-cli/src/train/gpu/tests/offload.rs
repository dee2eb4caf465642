//! Masters and states in page-locked memory of the host: runs are those of the device's memory, to the bit.

use super::{Alone, Asked, BUNDLED, SMALL, asked, gpu, late, train};
use lowp_kernels::Cuda;
use lowp_train::result::RunResult;
use lowp_train::{Text, Training};

#[test]
fn losses_and_checkpoints_are_those_without() {
    let Some(cuda) = gpu() else { return };
    for words in [
        "--recipe mxfp8-2d",
        "--recipe fp8-delayed --arch llama",
        "--recipe nvfp4-2d --accumulate 2",
        "--recipe fp8-block --optimizer lion",
        "--recipe fp8-current --optimizer-state master=bf16,exp_avg=fp8,exp_avg_sq=fp8",
        "--recipe mxfp8 --optimizer muon --optimizer-state exp_avg=bf16",
        "--recipe nvfp4-2d --sharding zero1",
    ] {
        let words = format!("{SMALL} --device cuda {words}");
        let [on_device, on_host] = ["", " --offload-optimizer"].map(|more| {
            let asked = asked(&format!("{words}{more}"));
            train(&cuda, &asked, 4)
        });
        assert_eq!(on_device.losses, on_host.losses, "{words}");
        assert!(on_device.saved == on_host.saved, "{words}");
    }
}

/// The run that `asked` asks for, with its checkpoints.
fn whole(cuda: &Cuda, asked: &Asked) -> RunResult {
    let Asked { args, setup } = asked;
    let text = Text::new(BUNDLED.to_vec(), setup.config.model.seq).expect("the text");
    let training = Training {
        checkpoints: setup.checkpoints.clone(),
        ..Training::new(&setup.runs[0], &setup.config, &text)
    };
    let result = training.rank(cuda, cuda.alone(), |sharded, place| {
        Ok(super::super::network(
            cuda,
            sharded,
            args,
            &setup.config,
            place,
        )?)
    });
    result.expect("a run")
}

#[test]
fn runs_go_on_from_checkpoints_of_the_other_kind() {
    let Some(cuda) = gpu() else { return };
    let words = format!("{SMALL} --recipe mxfp8-2d --device cuda --steps 6");
    let kinds = ["", " --offload-optimizer"];
    let expected = whole(&cuda, &asked(&words));
    for [first, then] in [kinds, [kinds[1], kinds[0]]] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().display();
        let begun = format!("{words}{first} --save {path} --stop-after 3");
        let begun = whole(&cuda, &asked(&begun));
        let ended = whole(&cuda, &asked(&format!("{words}{then} --resume {path}")));
        assert_eq!((begun.steps, ended.resumed_at), (3, 3));
        assert_eq!(ended.train_loss, expected.train_loss);
        assert_eq!(ended.val_loss, expected.val_loss);
        for (result, kind) in [(&begun, first), (&ended, then)] {
            let locked = result.page_locked_bytes_per_rank;
            assert_eq!(locked.is_some(), !kind.is_empty());
        }
    }
}

/// The model is made again for the tail.
#[test]
fn a_precision_tail_is_that_without() {
    let Some(cuda) = gpu() else { return };
    let words = format!("{SMALL} --recipe mxfp8-2d --device cuda --steps 4 --precision-tail 0.5");
    let [on_device, on_host] =
        ["", " --offload-optimizer"].map(|more| whole(&cuda, &asked(&format!("{words}{more}"))));
    assert_eq!(on_device.train_loss, on_host.train_loss);
    assert_eq!(on_device.page_locked_bytes_per_rank, None);
    assert!(on_host.page_locked_bytes_per_rank > Some(0));
}

/// Rows, slices and matrices over ranks, each with a host's memory of its own.
#[test]
fn ranks_are_those_without() {
    for words in [
        "--recipe mxfp8-2d",
        "--recipe nvfp4-2d --sharding zero1",
        "--recipe fp8-current --optimizer muon",
    ] {
        let words = format!("{SMALL} --device cuda {words}");
        for devices in late::worlds() {
            let [on_device, on_host] = ["", " --offload-optimizer"].map(|more| {
                let (_, ended) =
                    late::train(&devices, &asked(&format!("{words}{more}")), None, false);
                let losses = ended.into_iter().map(|run| run.expect("a run").train_loss);
                losses.collect::<Vec<_>>()
            });
            assert_eq!(on_device, on_host, "{words}, {} ranks", devices.len());
        }
    }
}
