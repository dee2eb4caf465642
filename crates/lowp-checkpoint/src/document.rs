//! The text of `index.json`: an [`Index`], its version and its checksum.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::index::{Index, checksum};
use crate::{CheckpointError, version1};

/// The version that this crate writes. It reads the one before, too.
pub(crate) const VERSION: u64 = 2;

/// The file: the index as it stands there, and a checksum of its bytes. Numbers do not all survive a change to another text.
#[derive(Debug, Serialize, Deserialize)]
struct Document<'a> {
    version: u64,
    checksum: String,
    #[serde(borrow)]
    index: &'a RawValue,
}

impl Document<'_> {
    /// The index in `text` if it is one of today, whatever the version.
    fn index_of_today(text: &str) -> Option<Index> {
        let document: Document<'_> = serde_json::from_str(text).ok()?;
        let index = document.index.get();
        let same = checksum(index.as_bytes()) == document.checksum;
        same.then(|| serde_json::from_str(index).ok())?
    }
}

/// The version, whatever else a file has.
#[derive(Debug, Deserialize)]
struct Version {
    version: u64,
}

impl Index {
    /// The file as text, without spaces.
    pub(crate) fn render(&self) -> Result<String, serde_json::Error> {
        let index = RawValue::from_string(serde_json::to_string(self)?)?;
        let document = Document {
            version: VERSION,
            checksum: checksum(index.get().as_bytes()),
            index: &index,
        };
        Ok(serde_json::to_string(&document)? + "\n")
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, CheckpointError> {
        let damaged = |why: String| CheckpointError::damaged(path, why);
        let json = |error: serde_json::Error| damaged(format!("it is no index: {error}"));
        let Version { version } = serde_json::from_str(text).map_err(json)?;
        if !(1..=VERSION).contains(&version) {
            let found = Document::index_of_today(text);
            if found.is_some_and(|index| index.check().is_ok()) {
                return Err(damaged(format!(
                    "it has version {version}, and the index of version {VERSION}"
                )));
            }
            let why = format!(
                "the checkpoint has version {version}, but this program reads versions 1 to {VERSION}; use the program that wrote it"
            );
            return Err(CheckpointError::other(path, why));
        }
        let document: Document<'_> = serde_json::from_str(text).map_err(json)?;
        let text = document.index.get();
        if checksum(text.as_bytes()) != document.checksum {
            return Err(damaged("its checksum is another one".to_owned()));
        }
        let index = match version {
            1 => version1::parse(text),
            _ => serde_json::from_str(text).map_err(|error| format!("it is no index: {error}")),
        };
        let index: Self = index.map_err(damaged)?;
        index.check().map_err(damaged)?;
        Ok(index)
    }
}
