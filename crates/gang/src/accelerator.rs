//! Accelerators, and how a task asks for them: by path (`/gpu/h200`: kind, then model), count and memory.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// One device of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// `gpu`, `fpga`, or whatever a discovery script calls it; in lower case.
    pub kind: String,
    /// What it calls itself, such as `NVIDIA H200`; empty if unknown.
    pub model: String,
    /// Its number on the host among those of its kind.
    pub index: u32,
    /// Its name in all the world; empty if unknown.
    pub uuid: String,
    /// In bytes; zero if unknown.
    pub memory: u64,
}

impl Accelerator {
    /// Whether both are the same device of one host: by UUID where both have one, else by number.
    pub fn is_same(&self, other: &Self) -> bool {
        let same = match self.uuid.is_empty() || other.uuid.is_empty() {
            true => self.index == other.index,
            false => self.uuid == other.uuid,
        };
        same && self.kind == other.kind
    }
}

/// A kind of accelerator, and perhaps a model of it.
///
/// `/gpu/h200` is any GPU in whose name `H200` stands as words of its own: upper and lower case are the same, and so are
/// all characters between words. `/gpu` and `/gpu/*` are any GPU.
///
/// ```
/// use deuteron_gang::{Accelerator, AcceleratorPath};
///
/// let path: AcceleratorPath = "/gpu/a100".parse()?;
/// let model = "NVIDIA A100-SXM4-80GB".to_owned();
/// let device = Accelerator { kind: "gpu".into(), model, index: 0, uuid: String::new(), memory: 85_899_345_920 };
/// assert!(path.matches(&device));
/// assert!(!"/gpu/a10".parse::<AcceleratorPath>()?.matches(&device));
/// # Ok::<(), deuteron_gang::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AcceleratorPath {
    kind: String,
    model: Option<String>,
}

impl AcceleratorPath {
    /// The kind, in lower case.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether the device is of this kind and model.
    pub fn matches(&self, device: &Accelerator) -> bool {
        self.kind.eq_ignore_ascii_case(&device.kind)
            && self.model.as_ref().is_none_or(|model| is_called(&device.model, &joined(model)))
    }
}

/// Whether neighbouring words of `name` make up `wanted`.
fn is_called(name: &str, wanted: &str) -> bool {
    let words: Vec<String> = words(name).collect();
    (0..words.len())
        .any(|first| (first..words.len()).any(|last| words[first..=last].concat() == wanted))
}

fn words(name: &str) -> impl Iterator<Item = String> {
    name.split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

fn joined(name: &str) -> String {
    words(name).collect()
}

impl FromStr for AcceleratorPath {
    type Err = crate::Error;

    fn from_str(path: &str) -> crate::Result<Self> {
        let invalid = |what: &str| {
            let shape =
                "a path is a kind and perhaps a model, such as /gpu, /gpu/h200 or /fpga/u250";
            crate::Error::Invalid(format!("accelerator {path:?} {what}: {shape}"))
        };
        let mut parts = path
            .strip_prefix('/')
            .ok_or_else(|| invalid("does not start with a slash"))?
            .split('/');
        let kind = parts.next().unwrap_or_default();
        let model = parts.next();
        if parts.next().is_some() {
            return Err(invalid("has more than two parts"));
        }
        let is_word = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        if kind.is_empty() || !kind.chars().all(is_word) {
            return Err(invalid("has no kind made of letters, digits, - and _"));
        }
        let model = match model {
            None | Some("*") => None,
            Some(model) if joined(model).is_empty() => {
                return Err(invalid("has no letter or digit in its model"));
            }
            Some(model) if model.contains('*') => {
                return Err(invalid("has a * beside other characters"));
            }
            Some(model) => Some(model.to_lowercase()),
        };
        Ok(Self { kind: kind.to_ascii_lowercase(), model })
    }
}

impl fmt::Display for AcceleratorPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", self.kind)?;
        self.model.as_ref().map_or(Ok(()), |model| write!(f, "/{model}"))
    }
}

impl TryFrom<String> for AcceleratorPath {
    type Error = crate::Error;

    fn try_from(path: String) -> crate::Result<Self> {
        path.parse()
    }
}

impl From<AcceleratorPath> for String {
    fn from(path: AcceleratorPath) -> Self {
        path.to_string()
    }
}

/// What each task of a gang asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Which.
    pub path: AcceleratorPath,
    /// How many for one task.
    pub per_task: u32,
    /// The least memory of each, in bytes. A device whose memory is unknown has none.
    pub memory: u64,
    /// Whether a task without them must not run.
    pub required: bool,
}

impl Request {
    /// Whether the device is one of those asked for.
    pub fn matches(&self, device: &Accelerator) -> bool {
        self.path.matches(device) && device.memory >= self.memory
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.per_task, self.path)?;
        match self.memory {
            0 => Ok(()),
            memory => write!(f, " with at least {}", gigabytes(memory)),
        }
    }
}

pub(crate) fn gigabytes(bytes: u64) -> String {
    let tenths = bytes / 100_000_000;
    format!("{}.{} GB", tenths / 10, tenths % 10)
}

#[cfg(test)]
pub(crate) fn gpu(index: u32, model: &str) -> Accelerator {
    Accelerator {
        kind: "gpu".into(),
        model: model.into(),
        index,
        uuid: format!("GPU-{index}"),
        memory: 80_000_000_000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_match_by_whole_words() {
        let cases = [
            ("/gpu", "NVIDIA H200", true),
            ("/gpu", "", true),
            ("/GPU/*", "", true),
            ("/gpu/h200", "", false),
            ("/gpu/h200", "NVIDIA H200", true),
            ("/gpu/H200", "NVIDIA H200 141GB HBM3", true),
            ("/gpu/h200", "NVIDIA GH200 480GB", false),
            ("/gpu/a100", "NVIDIA A100-SXM4-80GB", true),
            ("/gpu/a100-sxm4", "NVIDIA A100-SXM4-80GB", true),
            ("/gpu/nvidia-a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", true),
            ("/gpu/a100-80gb", "NVIDIA A100-SXM4-80GB", false),
            ("/gpu/a10", "NVIDIA A100-SXM4-80GB", false),
            ("/gpu/a10", "NVIDIA A10", true),
            ("/gpu/l40", "NVIDIA L40S", false),
            ("/gpu/rtx4090", "NVIDIA GeForce RTX 4090", true),
            ("/gpu/rtx-4090", "NVIDIA GeForce RTX 4090", true),
            ("/gpu/4090", "NVIDIA GeForce RTX 4090", true),
            ("/fpga", "NVIDIA H200", false),
        ];
        for (path, model, expected) in cases {
            let parsed: AcceleratorPath = path.parse().unwrap();
            assert_eq!(parsed.matches(&gpu(0, model)), expected, "{path} and {model:?}");
        }
    }

    #[test]
    fn paths_are_shown_and_travel_as_they_are_written() {
        for (path, shown) in [
            ("/gpu", "/gpu"),
            ("/gpu/*", "/gpu"),
            ("/Gpu/H200", "/gpu/h200"),
            ("/fpga/u250", "/fpga/u250"),
        ] {
            let parsed: AcceleratorPath = path.parse().unwrap();
            assert_eq!(parsed.to_string(), shown);
            let text = serde_json::to_string(&parsed).unwrap();
            assert_eq!(text, format!("{shown:?}"));
            assert_eq!(serde_json::from_str::<AcceleratorPath>(&text).unwrap(), parsed);
        }
        assert!(serde_json::from_str::<AcceleratorPath>("\"gpu\"").is_err());
    }

    #[test]
    fn wrong_paths_are_explained() {
        let cases = [
            ("", "does not start with a slash"),
            ("gpu", "does not start with a slash"),
            ("/", "has no kind"),
            ("/*", "has no kind"),
            ("/gpu,fpga", "has no kind"),
            ("/gpu/", "has no letter or digit in its model"),
            ("/gpu/h2*", "has a * beside other characters"),
            ("/gpu/h200/1", "has more than two parts"),
        ];
        for (path, expected) in cases {
            let error = path.parse::<AcceleratorPath>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("accelerator {path:?} {expected}")), "{error}");
            assert!(error.contains("such as /gpu, /gpu/h200"), "{error}");
        }
    }

    #[test]
    fn requests_look_at_memory_too() {
        let mut request =
            Request { path: "/gpu/h200".parse().unwrap(), per_task: 2, memory: 0, required: true };
        let mut device = gpu(0, "NVIDIA H200");
        assert!(request.matches(&device));
        assert_eq!(request.to_string(), "2 × /gpu/h200");
        request.memory = 80_000_000_000;
        assert!(request.matches(&device));
        assert_eq!(request.to_string(), "2 × /gpu/h200 with at least 80.0 GB");
        device.memory = 0;
        assert!(!request.matches(&device));
    }
}
