//! [`Hub`]: a model as Hugging Face keeps it: a folder of weights in one file or several with an index, `config.json`, and
//! whatever else lies beside them.

use crate::file::input_error::file_error;
use crate::file::model::Model;
use crate::file::target::FolderTarget;
use crate::files::{open_regular, read_regular};
use crate::output::shown;
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The configuration of a model.
pub(in crate::file) const CONFIG: &str = "config.json";
/// What ModelOpt says of a quantized model.
pub(in crate::file) const MODELOPT_CONFIG: &str = "hf_quant_config.json";
/// The weights in one file.
pub(in crate::file) const WEIGHTS: &str = "model.safetensors";
/// The index of weights in several.
pub(in crate::file) const INDEX: &str = "model.safetensors.index.json";
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
pub(in crate::file) struct Hub {
    pub(in crate::file) model: Model,
    /// `config.json`, where there is one.
    pub(in crate::file) config: Option<Map<String, Value>>,
    /// Files that are carried along, and their names.
    others: Vec<(String, PathBuf)>,
    /// What is left out.
    left_out: Vec<String>,
}

impl Hub {
    /// Opens a folder, a safetensors file, or the index of a sharded model.
    ///
    /// # Errors
    /// A folder without weights or with several, or what [`Model::open`] returns; a configuration that is none.
    pub(in crate::file) fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Ok(Self {
                model: Model::open(path)?,
                config: None,
                others: Vec::new(),
                left_out: Vec::new(),
            });
        }
        let names = names(path)?;
        let model = Model::open(&path.join(weights(path, &names)?))?;
        let mut hub = Self {
            model,
            config: object(path, &names, CONFIG)?,
            others: Vec::new(),
            left_out: Vec::new(),
        };
        let own: Vec<PathBuf> = hub.model.files().map(Path::to_owned).collect();
        for name in names {
            let full = path.join(&name);
            if own.contains(&full) || [CONFIG, MODELOPT_CONFIG].contains(&&*name) {
                continue;
            }
            let carried = full.is_file()
                && !name.starts_with('.')
                && !OTHER_WEIGHTS.iter().any(|end| name.ends_with(end));
            if carried {
                hub.others.push((name, full));
            } else {
                hub.left_out.push(name);
            }
        }
        Ok(hub)
    }

    /// Names of what lies in the folder and is not carried along.
    pub(in crate::file) fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Copies what is carried along. Returns the bytes.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(in crate::file) fn copy_others(&self, target: &FolderTarget) -> Result<u64> {
        let mut written = 0;
        let mut buffer = vec![0; 1 << 20];
        for (name, path) in &self.others {
            let cannot = || format!("cannot read {}", path.display());
            let (mut file, _) = open_regular(path).with_context(cannot)?;
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
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>> {
    let cannot =
        |e: &dyn std::fmt::Display| file_error(folder, format!("cannot read this folder: {e}"));
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| cannot(&e))? {
        let name = entry.map_err(|e| cannot(&e))?.file_name();
        let name = name.into_string().map_err(|name| {
            file_error(
                folder,
                format!(
                    "the name '{}' in it is no Unicode text; rename that file",
                    shown(&name.to_string_lossy())
                ),
            )
        })?;
        names.push(name);
    }
    names.sort();
    Ok(names)
}

/// The file or the index of the weights in `folder`.
fn weights(folder: &Path, names: &[String]) -> Result<String> {
    let of = |end: &str| -> Vec<&String> {
        let has = |name: &&String| name.ends_with(end) && !name.starts_with('.');
        names.iter().filter(has).collect()
    };
    let has = |name: &str| names.iter().any(|known| known == name);
    match (has(WEIGHTS), has(INDEX)) {
        (true, true) => {
            return Err(file_error(
                folder,
                format!(
                    "it holds {WEIGHTS} and {INDEX}, which are two models; give one of them, or move the other away"
                ),
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
        ([], []) => Err(file_error(
            folder,
            "it holds no .safetensors file and no checkpoint of `lowp train --save`; give a folder that does",
        )),
        (indices, files) => Err(file_error(
            folder,
            format!(
                "it holds {} .safetensors files and {} indices of sharded models; give the index or the file that is meant",
                files.len(),
                indices.len()
            ),
        )),
    }
}

/// The JSON object in file `name` of `folder`, if it is there.
fn object(folder: &Path, names: &[String], name: &str) -> Result<Option<Map<String, Value>>> {
    if !names.iter().any(|known| known == name) {
        return Ok(None);
    }
    let path = folder.join(name);
    let bytes = read_regular(&path, MAX_CONFIG)
        .map_err(|e| file_error(&path, format!("cannot read it: {e}")))?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(Some(object)),
        Ok(_) => Err(file_error(&path, "it is no JSON object; write it again")),
        Err(e) => Err(file_error(
            &path,
            format!("it is no JSON: {}; write it again", shown(&e.to_string())),
        )),
    }
}
