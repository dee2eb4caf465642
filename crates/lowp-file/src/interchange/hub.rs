//! [`Hub`]: a model as Hugging Face keeps it: a folder of weights in one file or several with an index, `config.json`, and
//! whatever else lies next to them.

use crate::error::{Context, FileError, Result, file_error, mend_file};
use crate::files::{copy_atomically, open_regular, read_regular};
use crate::json::JsonObject;
use crate::limits::hinted;
use crate::model::Model;
use crate::output::path::OutputFolder;
use crate::remedy::Remedy;
use crate::text::shown;
use crate::{checkpoint, rank_names};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

pub(crate) const CONFIG: &str = "config.json";
/// What ModelOpt says of a quantized model.
pub(crate) const MODELOPT_CONFIG: &str = "hf_quant_config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// The folder, next to the checkpoints of a run, of what its exports carry along: the tokenizer and other files of the model that it began
/// with.
pub const CARRIED: &str = "carried";
/// Longest configuration that is read.
const MAX_CONFIG: u64 = 64 << 20;
/// Ends of names of weights of other kinds, which are not those of the output.
const OTHER_WEIGHTS: [&str; 10] = [
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
];

/// A model in a folder, or a file alone.
#[derive(Debug)]
pub struct Hub {
    /// The tensors of all of its files.
    pub model: Model,
    /// `config.json`, where there is one.
    pub config: Option<JsonObject>,
    /// What lies next to the weights; nothing, where a file is given.
    pub other_files: OtherFiles,
}

/// What lies next to the weights of a folder.
#[derive(Debug, Default)]
pub struct OtherFiles {
    /// Files that say how the weights are stored, and their names.
    configs: Vec<(String, PathBuf)>,
    /// Others that are carried along.
    others: Vec<(String, PathBuf)>,
    left_out: Vec<String>,
}

impl Hub {
    /// Opens a folder, a safetensors file, or the index of a sharded model.
    ///
    /// # Errors
    /// A folder without weights or with several, or what [`Model::open`] returns; a configuration that is none.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Ok(Self {
                model: Model::open(path)?,
                config: None,
                other_files: OtherFiles::default(),
            });
        }
        if checkpoint::is_checkpoint(path) {
            return Err(mend_file(path, "a checkpoint", Remedy::ExportCheckpoint));
        }
        let names = names(path)?;
        if rank_names::are_in(&names) {
            return Err(mend_file(path, "a folder of rank files", Remedy::Unshard));
        }
        let model = Model::open(&path.join(weights(path, &names)?))?;
        let own: Vec<PathBuf> = model.files().map(Path::to_owned).collect();
        Ok(Self {
            config: object(path, &names, CONFIG)?,
            other_files: OtherFiles::of(path, names, &own),
            model,
        })
    }
}

impl OtherFiles {
    /// What lies in `folder` next to its `weights`.
    pub(crate) fn in_folder(folder: &Path, weights: &[PathBuf]) -> Result<Self> {
        Ok(Self::of(folder, names(folder)?, weights))
    }

    fn of(folder: &Path, names: Vec<String>, weights: &[PathBuf]) -> Self {
        let mut found = Self::default();
        for name in names {
            let full = folder.join(&name);
            if weights.contains(&full) {
                continue;
            }
            let carried = full.is_file()
                && !name.starts_with('.')
                && !OTHER_WEIGHTS.iter().any(|end| name.ends_with(end));
            match (carried, [CONFIG, MODELOPT_CONFIG].contains(&&*name)) {
                (true, true) => found.configs.push((name, full)),
                (true, false) => found.others.push((name, full)),
                (false, _) => found.left_out.push(name),
            }
        }
        found
    }

    /// The names of what is left out.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// What lies in `folder` next to its weights, of which it may have none.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn next_to(folder: &Path) -> Result<Self> {
        Self::in_folder(folder, &[])
    }

    /// Copies what is carried along, but for what says how weights are stored, to `folder`, which is created.
    ///
    /// # Errors
    /// A file that cannot be read or written; those before it are there.
    pub fn carry_to(&self, folder: &Path) -> Result<()> {
        let cannot = || format!("cannot write {}", folder.display());
        fs::create_dir_all(folder).with_context(cannot)?;
        for (name, path) in &self.others {
            let to = folder.join(name);
            let cannot = || format!("cannot copy {} to {}", path.display(), to.display());
            copy_atomically(path, &to).with_context(cannot)?;
        }
        Ok(())
    }

    /// Copies what is carried along but for what says how weights are stored. Returns the bytes.
    pub(crate) fn copy_others(&self, target: &OutputFolder) -> Result<u64> {
        copy(&self.others, target)
    }

    pub(crate) fn copy_all(&self, target: &OutputFolder) -> Result<u64> {
        Ok(copy(&self.configs, target)? + copy(&self.others, target)?)
    }
}

fn copy(files: &[(String, PathBuf)], target: &OutputFolder) -> Result<u64> {
    let mut written = 0;
    let mut buffer = vec![0; 1 << 20];
    for (name, path) in files {
        let cannot = || format!("cannot read {}", path.display());
        let (mut file, _) = open_regular(path).map_err(hinted).with_context(cannot)?;
        let mut draft = target.create(name)?;
        loop {
            let count = file.read(&mut buffer).with_context(cannot)?;
            if count == 0 {
                break;
            }
            draft.write(&buffer[..count])?;
        }
        written += draft.finish()?;
    }
    Ok(written)
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let cannot = |e: &dyn std::fmt::Display| file_error!(folder, "cannot read this folder: {e}");
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| cannot(&hinted(e)))? {
        let name = entry.map_err(|e| cannot(&e))?.file_name();
        let name = name.into_string().map_err(|name| {
            file_error!(
                folder,
                "the name '{}' in it is no Unicode text; rename that file",
                shown(&name.to_string_lossy())
            )
        })?;
        names.push(name);
    }
    names.sort();
    Ok(names)
}

fn weights(folder: &Path, names: &[String]) -> Result<String> {
    let of = |end: &str| -> Vec<&String> {
        let has = |name: &&String| name.ends_with(end) && !name.starts_with('.');
        names.iter().filter(has).collect()
    };
    let has = |name: &str| names.iter().any(|known| known == name);
    match (has(WEIGHTS), has(INDEX)) {
        (true, true) => {
            return Err(file_error!(
                folder,
                "it holds {WEIGHTS} and {INDEX}, which are two models; give one of them, or move the other away"
            ));
        }
        (true, false) => return Ok(WEIGHTS.to_owned()),
        (false, true) => return Ok(INDEX.to_owned()),
        (false, false) => {}
    }
    let (indices, files) = (of(".safetensors.index.json"), of(".safetensors"));
    match (&indices[..], &files[..]) {
        ([index], _) => Ok((*index).clone()),
        ([], [file]) => Ok((*file).clone()),
        ([], []) if checkpoint::is_checkpoint(folder) => Err(FileError::in_file(
            folder,
            "it is a checkpoint of a training run, which `lowp export` makes a model of; give that model",
        )),
        ([], []) => Err(FileError::in_file(
            folder,
            "it holds no .safetensors file and no checkpoint; give a folder that does",
        )),
        (indices, files) => Err(file_error!(
            folder,
            "it holds {} .safetensors files and {} indices of sharded models; give the index or the file that is meant",
            files.len(),
            indices.len()
        )),
    }
}

fn object(folder: &Path, names: &[String], name: &str) -> Result<Option<JsonObject>> {
    if !names.iter().any(|known| known == name) {
        return Ok(None);
    }
    let path = folder.join(name);
    let bytes = read_regular(&path, MAX_CONFIG)
        .map_err(|e| file_error!(&path, "cannot read it: {}", hinted(e)))?;
    let object = JsonObject::parse(bytes)
        .map_err(|why| file_error!(&path, "{}; write it again", shown(&why)))?;
    Ok(Some(object))
}
