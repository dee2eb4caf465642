//! [`Model`]: the tensors of one safetensors file, or of all files of a sharded model.

use crate::error::{Context, FileError, Result, file_error, input_error};
use crate::files::{open_regular, read_regular};
use crate::foreign;
use crate::header::{self, Entries};
use crate::keys;
use crate::limits::hinted;
use crate::mmap::{self, Bytes, Reader};
use crate::stamp::{Stamp, changed};
use crate::text::{dims, shown};
use lowp_checkpoint::MAX_HEADER;
use lowp_kernels::{CpuBuffer, Element};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

/// Bytes that are read at a time, which stay in a core's cache; a multiple of every element's size.
const READ: usize = 256 << 10;

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    stamp: Stamp,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// Bytes of a file, which are still in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteRange<'a> {
    start: usize,
    len: usize,
    file: &'a Opened,
}

impl ByteRange<'_> {
    /// Bytes `range` of them. Memory is used only while they live.
    fn bytes_at(&self, range: Range<usize>) -> Result<Bytes> {
        Bytes::of(
            &self.file.file,
            &(self.start + range.start..self.start + range.end),
        )
        .map_err(|e| cannot_read(&self.file.path, e))
    }

    /// Hands bytes `range` to `take` in pieces of [`READ`], each with its distance from the start of the range.
    pub(crate) fn pieces(
        &self,
        range: Range<usize>,
        mut take: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut reader = Reader::new(&self.file.file);
        for start in range.clone().step_by(READ) {
            let part = self.start + start..self.start + range.end.min(start + READ);
            let bytes = reader.bytes(&part);
            let bytes = bytes.map_err(|e| cannot_read(&self.file.path, e))?;
            take(start - range.start, bytes)?;
        }
        Ok(())
    }
}

/// One tensor; its bytes are still in the file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// The dtype that the file has for it: codes may be plain bytes.
    pub dtype: Dtype,
    /// Its dimensions; none of a single value.
    pub shape: &'a [usize],
    bytes: ByteRange<'a>,
}

impl Tensor<'_> {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len
    }

    pub(crate) fn start(&self) -> usize {
        self.bytes.start
    }

    /// Its values where they lie, for kernels of the CPU; `None` where they cannot be used there.
    pub(crate) fn values<T: Element>(&self) -> Option<CpuBuffer<T>> {
        let ByteRange { start, len, file } = self.bytes;
        mmap::values(&file.file, &(start..start + len))
    }

    /// Bytes `range` of the tensor. Memory is used only while they live.
    pub(crate) fn bytes_at(&self, range: Range<usize>) -> Result<Bytes> {
        self.bytes.bytes_at(range)
    }

    /// Hands bytes `range` to `take` in pieces of [`READ`], each with its distance from the start of the range.
    pub(crate) fn pieces(
        &self,
        range: Range<usize>,
        take: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        self.bytes.pieces(range, take)
    }
}

/// Tensors by name, and the string metadata of their files.
#[derive(Debug)]
pub struct Model {
    path: PathBuf,
    files: Vec<Opened>,
    tensors: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

impl Model {
    /// Opens a safetensors file, or a sharded model by its `*.safetensors.index.json`.
    ///
    /// # Errors
    /// A file that is missing, cut off or malformed, or an index that its files do not fit.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Err(FileError::in_file(
                path,
                "a folder where a .safetensors file is looked for",
            ));
        }
        let mut model = Self {
            path: path.to_owned(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            metadata: BTreeMap::new(),
        };
        if path.extension().is_some_and(|e| e == "json") {
            model.add_index(path)?;
        } else {
            model.add_file(path)?;
        }
        Ok(model)
    }

    fn add_index(&mut self, path: &Path) -> Result<()> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: Entries<String, String, true>,
        }
        let text = read_regular(path, MAX_HEADER as u64).map_err(|e| cannot_read(path, e))?;
        if let Some(what) = foreign::explain(&text) {
            return Err(FileError::in_file(path, what));
        }
        let Index {
            weight_map: Entries(mut places),
        } = serde_json::from_slice(&text).map_err(|e| {
            file_error!(
                path,
                "no index of a sharded model: {}; write it again",
                shown(&e.to_string())
            )
        })?;
        places.sort_by(|a, b| a.1.cmp(&b.1).then_with(|| a.0.cmp(&b.0)));
        let mut opened: BTreeMap<&str, usize> = BTreeMap::new();
        for (name, file) in &places {
            let wrong = |why: &str| {
                let (name, file) = (shown(name), shown(file));
                file_error!(path, "it puts '{name}' into '{file}', {why}")
            };
            if !opened.contains_key(file.as_str()) {
                let mut parts = Path::new(file).components();
                if !matches!(
                    (parts.next(), parts.next()),
                    (Some(Component::Normal(_)), None)
                ) {
                    return Err(wrong("which is no file name beside the index"));
                }
                let full = path.with_file_name(file);
                // Whatever else is wrong with it is an error of who opens it.
                if !full.exists() {
                    return Err(wrong("which is missing; put that file beside the index"));
                }
                opened.insert(file, self.files.len());
                self.add_file(&full)?;
            }
            let found = self.tensors.get(name).map(|entry| entry.file);
            if found != opened.get(file.as_str()).copied() {
                return Err(wrong(
                    "which does not hold it; correct the index or the file",
                ));
            }
        }
        let named: BTreeSet<&str> = places.iter().map(|(name, _)| name.as_str()).collect();
        let unnamed = self
            .tensors
            .iter()
            .find(|(name, _)| !named.contains(name.as_str()));
        if let Some((name, entry)) = unnamed {
            let file = self.files[entry.file].path.display();
            return Err(file_error!(
                path,
                "{file} holds '{}', which the index does not name; correct the index",
                shown(name)
            ));
        }
        Ok(())
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let (file, _) = open_regular(path).map_err(|e| cannot_read(path, e))?;
        let stamp = Stamp::of(&file).map_err(|e| cannot_read(path, e))?;
        let length = usize::try_from(stamp.length)
            .map_err(|_| FileError::in_file(path, "larger than this machine can address"))?;
        let bytes = Bytes::of(&file, &(0..length)).map_err(|e| cannot_read(path, e))?;
        let (begin, header) = header::read(path, &bytes)?;
        let index = self.files.len();
        for (name, info) in header.tensors() {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                file: index,
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: begin + start..begin + end,
            };
            if let Some(other) = self.tensors.insert(name.clone(), entry) {
                let other = self.files[other.file].path.display();
                return Err(file_error!(
                    path,
                    "it holds '{}', which {other} holds too; keep one of them",
                    shown(&name)
                ));
            }
        }
        if let Some(metadata) = header.metadata() {
            keys::check_keys(path, metadata)?;
            self.add_metadata(path, metadata)?;
        }
        self.files.push(Opened {
            path: path.to_owned(),
            file,
            stamp,
        });
        Ok(())
    }

    /// Of keys that several files have, the first value is kept; ours must agree.
    fn add_metadata(&mut self, path: &Path, metadata: &HashMap<String, String>) -> Result<()> {
        for (key, value) in metadata {
            let entry = self.metadata.entry(key.clone());
            let known = entry.or_insert_with(|| value.clone());
            if known != value && keys::is_ours(key) {
                return Err(file_error!(
                    path,
                    "its metadata '{}' are not those of another file of the model; quantize the model again",
                    shown(key)
                ));
            }
        }
        Ok(())
    }

    /// What was made of it, `made`, where no file was changed meanwhile.
    pub(crate) fn steady<T>(&self, made: Result<T>) -> Result<T> {
        for Opened { path, file, stamp } in &self.files {
            if Stamp::of(file).map_err(|e| cannot_read(path, e))? != *stamp {
                return Err(changed(path));
            }
        }
        made
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.stamp.length).sum()
    }

    /// Forgets all metadata, and the tensors that `keep` is false for.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.metadata = BTreeMap::new();
        self.tensors.retain(|name, _| keep(name));
    }

    /// The `len` bytes from `start` of the only file of this model.
    pub(crate) fn byte_range(&self, start: usize, len: usize) -> Result<ByteRange<'_>> {
        let file = self.files.first().context("a model of no file")?;
        let end = start.checked_add(len);
        match end {
            Some(end) if end as u64 <= file.stamp.length => Ok(ByteRange { start, len, file }),
            _ => Err(FileError::Missing(format!(
                "{}: bytes {start} to {len} more are beyond its end",
                file.path.display()
            ))),
        }
    }

    /// What the user called it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that it consists of.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files
            .iter()
            .map(|file| file.path.as_path())
            .chain([self.path.as_path()])
    }

    /// The string metadata of all files.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The tensors, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.tensors
            .iter()
            .map(|(name, entry)| self.view(name, entry))
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        let (name, entry) = self.tensors.get_key_value(name)?;
        Some(self.view(name, entry))
    }

    pub(crate) fn expect(&self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<Tensor<'_>> {
        let Some(tensor) = self.get(name) else {
            return Err(file_error!(
                &self.path,
                "'{}' is missing, though the metadata says that it is there; quantize the model again",
                shown(name)
            ));
        };
        if (tensor.dtype, tensor.shape) != (dtype, shape) {
            return Err(file_error!(
                &self.path,
                "'{}' is {} {} where the metadata asks for {dtype} {}; quantize the model again",
                shown(name),
                tensor.dtype,
                dims(tensor.shape),
                dims(shape)
            ));
        }
        Ok(tensor)
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> Tensor<'a> {
        Tensor {
            name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: ByteRange {
                start: entry.range.start,
                len: entry.range.len(),
                file: &self.files[entry.file],
            },
        }
    }
}

fn cannot_read(path: &Path, error: io::Error) -> FileError {
    // Bytes are looked for only where they were when it was opened.
    if error.kind() == io::ErrorKind::UnexpectedEof {
        return changed(path);
    }
    input_error(format!("cannot read {}: {}", path.display(), hinted(error)))
}
