//! Where `lowp train` may write: not over what it reads, nor into the folder of another run or over the files of its own.

use super::args::Args;
use super::config::Setup;
use crate::files::check_distinct;
use crate::usage::UsageError;
use lowp_checkpoint::is_checkpoint;
use lowp_file::files::lies_below;
use lowp_train::Checkpoints;
use std::path::absolute;

/// Checks that files which are written are others than those which are read.
pub(super) fn check_distinct_from_inputs(args: &Args) -> Result<(), UsageError> {
    let saved = args.save.as_deref().map(|path| ("--save", path));
    let model = args.model.as_deref();
    let logged = args.log_dir.as_deref().map(|path| ("--log-dir", path));
    let written = || args.outputs().chain(saved).chain(logged);
    let inputs = [("--model", model), ("--config", args.config.as_deref())];
    let inputs = inputs.map(|(option, path)| path.map(|path| (option, path)));
    let data = || args.data.iter().map(|data| ("--data", data.path.as_path()));
    check_distinct(inputs.into_iter().flatten().chain(data()), written())?;
    for (input, folder) in model
        .map(|model| ("--model", model))
        .into_iter()
        .chain(data())
    {
        if let Some((option, path)) = written().find(|(_, path)| lies_below(path, folder)) {
            let harm = match input {
                "--model" => "could replace a file of the model",
                _ => "would become part of the training text",
            };
            let (path, folder) = (path.display(), folder.display());
            return Err(UsageError::new(format!(
                "{option} {path} is inside {input} {folder}, so the output {harm}; give another folder"
            )));
        }
    }
    Ok(())
}

/// Files that are written must not replace those of a run, nor a run go into the checkpoint of another one, which goes with it.
pub(super) fn check_run_folders(args: &Args, setup: &Setup) -> Result<(), UsageError> {
    let folders = [("--save", &args.save), ("--log-dir", &args.log_dir)];
    for (option, folder) in folders {
        let Some(path) = folder.as_ref().and_then(|folder| absolute(folder).ok()) else {
            continue;
        };
        if let Some(checkpoint) = path.ancestors().find(|&above| is_checkpoint(above)) {
            let (path, checkpoint) = (path.display(), checkpoint.display());
            return Err(UsageError::new(format!(
                "{option} {path} is inside the checkpoint {checkpoint}, and would be deleted with it; give another folder"
            )));
        }
    }
    for (run, config) in setup.each() {
        let of_logs = args.log_dir.as_deref().map(Checkpoints::in_folder);
        let of_logs = of_logs.and_then(|logs| logs.folder_of(run, config.seed));
        let resumed = setup.checkpoints.source(run, config.seed).ok().flatten();
        let saved = setup.checkpoints.folder_of(run, config.seed);
        for folder in [saved, resumed, of_logs].into_iter().flatten() {
            if let Some((option, path)) = args.outputs().find(|(_, path)| lies_below(path, &folder))
            {
                let (path, folder) = (path.display(), folder.display());
                return Err(UsageError::new(format!(
                    "{option} {path} is inside {folder}, the folder of a run, and could replace one of its files; give another folder"
                )));
            }
        }
    }
    Ok(())
}
