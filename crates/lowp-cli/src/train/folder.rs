//! [`ModelFolder`]: the Hugging Face folder of `--model`.

use crate::files::read_json;
use crate::usage::{UsageError, input_error};
use anyhow::{Context, Result};
use lowp_checkpoint::checksum;
use lowp_file::Hub;
use lowp_file::hub::CARRIED;
use lowp_train::Model;
use lowp_transformer::{Arch, GptConfig, Llama};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A model that runs begin with.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    path: PathBuf,
    /// A digest of its whole `config.json`.
    config: String,
    /// Its `config.json`, without what it says of quantized weights.
    pub(crate) json: Value,
    /// Its weights, unless a run begins with random ones.
    pub(crate) hub: Option<Hub>,
}

impl ModelFolder {
    /// The folder at `path`, and the network that it describes, for sequences of `seq` tokens.
    pub(crate) fn open(
        path: &Path,
        seq: Option<usize>,
        from_scratch: bool,
    ) -> Result<(Self, GptConfig)> {
        let file = path.join("config.json");
        let name = file.display().to_string();
        let mut json = read_json("--model", &name)?;
        let config = GptConfig::of_hub(&name, &json, seq);
        let config = config.map_err(|error| UsageError::new(error.to_string()))?;
        let whole = checksum(json.to_string().as_bytes());
        if let Some(json) = json.as_object_mut() {
            json.remove("quantization_config");
        }
        let hub = match from_scratch {
            true => None,
            false => Some(Hub::open(path)?),
        };
        let path = path.to_owned();
        if let (Some(seq), false) = (seq, from_scratch) {
            check_positions(&path, &json, &config, seq)?;
        }
        let folder = Self {
            path,
            config: whole,
            json,
            hub,
        };
        folder.check(&config)?;
        Ok((folder, config))
    }

    /// Checks that all parameters of the network are there.
    fn check(&self, config: &GptConfig) -> Result<()> {
        let Some(hub) = &self.hub else {
            return Ok(());
        };
        let values = lowp_file::Values::new(hub)?;
        let linears = config.linears().into_iter().map(|linear| linear.name);
        let vars = config.vars().into_iter().map(|var| var.name);
        let parameters: BTreeSet<String> = linears.chain(vars).collect();
        if let Some(name) = parameters.iter().find(|name| !values.has(name)) {
            return Err(input_error(format!(
                "--model {}: there is no tensor '{name}', which config.json asks for; give a whole model, or --from-scratch",
                self.path.display()
            )));
        }
        let names = values.names()?;
        let extra = extra(&names, &parameters);
        if extra.is_empty() {
            return Ok(());
        }
        let first = extra.iter().take(3).map(|name| format!("'{name}'"));
        Err(input_error(format!(
            "--model {}: {} of {} tensors are no parameters of the network in config.json, so they would be lost: {}{}; give a model \
             without them, or --from-scratch",
            self.path.display(),
            extra.len(),
            names.len(),
            first.collect::<Vec<_>>().join(", "),
            if extra.len() > 3 { ", .." } else { "" }
        )))
    }

    /// A digest of what runs begin with: config.json and the weights, unless those are random.
    pub(crate) fn digest(&self) -> Result<String> {
        let weights = match &self.hub {
            Some(hub) => format!("weights {}", hub.model.digest()?),
            None => "random weights".to_owned(),
        };
        Ok(format!("config.json {}, {weights}", self.config))
    }

    /// Copies what exports carry along, such as the tokenizer, to the folder `run` of a run's checkpoints.
    pub(crate) fn carry(&self, run: &Path) -> Result<()> {
        let Some(hub) = &self.hub else {
            let hub = lowp_file::hub::OtherFiles::next_to(&self.path)?;
            return copy(&hub, run);
        };
        copy(&hub.other_files, run)
    }
}

/// Checks that the model was trained on positions as far as those of `seq` tokens.
fn check_positions(
    path: &Path,
    json: &Value,
    config: &GptConfig,
    seq: usize,
) -> Result<(), UsageError> {
    let key = "max_position_embeddings";
    let Arch::Llama(Llama { rope, .. }) = config.arch else {
        return Ok(());
    };
    let positions = json[key]
        .as_u64()
        .and_then(|positions| usize::try_from(positions).ok())
        .filter(|&positions| seq > positions && !rope.scaling.extends(positions));
    let Some(positions) = positions else {
        return Ok(());
    };
    Err(UsageError::new(format!(
        "--seq {seq} is more than {key} of --model {}, which is {positions}: later positions were never trained; give --seq {positions} or \
         less, rope_scaling in config.json, or --from-scratch",
        path.display()
    )))
}

/// The `names` that are none of `parameters`, without those whose values follow from others: a tied head (a network with a head of its own
/// has it as a parameter), the frequencies of rotary positions, and scales that inference casts activations with.
fn extra<'a>(names: &'a BTreeSet<String>, parameters: &'a BTreeSet<String>) -> Vec<&'a str> {
    let left_out = |name: &&str| {
        let ends = [
            ".rotary_emb.inv_freq",
            ".input_scale",
            ".output_scale",
            ".q_scale",
            ".k_scale",
            ".v_scale",
        ];
        *name == "lm_head.weight" || ends.iter().any(|end| name.ends_with(end))
    };
    let names = names.difference(parameters).map(String::as_str);
    names.filter(|name| !left_out(name)).collect()
}

fn copy(files: &lowp_file::hub::OtherFiles, run: &Path) -> Result<()> {
    let folder = run.join(CARRIED);
    let cannot = || format!("cannot write {}", folder.display());
    fs::create_dir_all(&folder).with_context(cannot)?;
    for (name, path) in files.others() {
        let to = folder.join(name);
        // With modes of its own: a file that is read-only where it comes from is replaced by a later run.
        copy_file(path, &to)
            .with_context(|| format!("cannot copy {} to {}", path.display(), to.display()))?;
    }
    Ok(())
}

/// Copies the contents of `from` to the file `to`, which is complete or as before.
fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let mut name = to.as_os_str().to_owned();
    name.push(".draft");
    let draft = PathBuf::from(name);
    let written = || -> io::Result<()> {
        let mut file = fs::File::create(&draft)?;
        io::copy(&mut fs::File::open(from)?, &mut file)?;
        file.sync_all()?;
        fs::rename(&draft, to)
    };
    written().inspect_err(|_| {
        let _ = fs::remove_file(&draft);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_follows_from_parameters_may_be_left_out() {
        let set = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let names = set(&[
            "a.weight",
            "a.bias",
            "lm_head.weight",
            "b.rotary_emb.inv_freq",
            "a.input_scale",
        ]);
        assert_eq!(extra(&names, &set(&["a.weight"])), ["a.bias"]);
    }

    /// As in the cache of a hub, whose files are read-only.
    #[test]
    fn a_read_only_file_is_copied_twice() {
        let folder = tempfile::tempdir().expect("a folder");
        let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
        for contents in ["first", "second"] {
            fs::write(&from, contents).expect("written");
            let writable = fs::metadata(&from).expect("its modes").permissions();
            let mut read_only = writable.clone();
            read_only.set_readonly(true);
            fs::set_permissions(&from, read_only).expect("set");
            copy_file(&from, &to).expect("copied");
            assert_eq!(fs::read_to_string(&to).expect("read"), contents);
            assert!(
                !fs::metadata(&to)
                    .expect("its modes")
                    .permissions()
                    .readonly()
            );
            fs::set_permissions(&from, writable).expect("set");
        }
        assert_eq!(fs::read_dir(folder.path()).expect("read").count(), 2);
    }
}
