//! What other programs have in the folder: which file has which device. Remembered until somebody else changes the folder.

use std::collections::HashMap;
use std::io::{self, Read};
use std::path::Path;

use serde::Deserialize;

use super::folder::{Stamp, is_spec_name, open_plain};

/// Bytes of a foreign file that are read; a larger one is passed over.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Somebody else's file with a device of the same qualified name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collision {
    /// `vendor/class=device`.
    pub device: String,
    /// Name of the file that has it.
    pub file: String,
}

#[derive(Default)]
pub(super) struct Others {
    /// The folder as it was when the devices were read. None: not read, or changed by others since.
    read_at: Option<Stamp>,
    /// File by qualified device name.
    devices: HashMap<String, String>,
}

/// As much of a spec as it takes to name its devices.
#[derive(Deserialize)]
struct Names {
    kind: String,
    #[serde(default)]
    devices: Vec<Name>,
}

#[derive(Deserialize)]
struct Name {
    name: String,
}

impl Others {
    /// Reads the folder unless it is as it was.
    pub(super) fn refresh(&mut self, folder: &Path, our_mark: &str) -> io::Result<()> {
        let now = Stamp::of(&std::fs::metadata(folder)?);
        if self.read_at == Some(now) {
            return Ok(());
        }
        self.devices.clear();
        for entry in std::fs::read_dir(folder)? {
            let Ok(name) = entry?.file_name().into_string() else { continue };
            if is_spec_name(&name) {
                self.add(folder, name, our_mark);
            }
        }
        self.read_at = Some(now).filter(Stamp::is_settled);
        Ok(())
    }

    /// Takes note of a change that was our own: it is no reason to read the others again. A change of theirs in the same tick
    /// of the file system's clock is seen with their next one.
    pub(super) fn changed_by_us(&mut self, folder: &Path, before: Option<Stamp>) {
        if self.read_at.is_some() && self.read_at == before {
            self.read_at = std::fs::metadata(folder).ok().map(|metadata| Stamp::of(&metadata));
        } else {
            self.read_at = None;
        }
    }

    pub(super) fn collisions(&self, qualified: &[String]) -> Vec<Collision> {
        let collision = |device: &String| {
            let file = self.devices.get(device)?;
            Some(Collision { device: device.clone(), file: file.clone() })
        };
        qualified.iter().filter_map(collision).collect()
    }

    /// A file that cannot be read gives no device to a runtime either.
    fn add(&mut self, folder: &Path, name: String, our_mark: &str) {
        let Some(text) = read_foreign(&folder.join(&name), our_mark) else { return };
        let Ok(Names { kind, devices }) = serde_saphyr::from_str::<Names>(&text) else { return };
        for device in devices {
            self.devices.insert(format!("{kind}={}", device.name), name.clone());
        }
    }
}

/// The text of somebody else's file.
fn read_foreign(path: &Path, our_mark: &str) -> Option<String> {
    let mut file = open_plain(path).ok()??;
    if file.metadata().ok()?.len() > FILE_BYTES_MAX {
        return None;
    }
    let mut mark = vec![0; our_mark.len()];
    let got = read_up_to(&mut file, &mut mark)?;
    mark.truncate(got);
    if mark == our_mark.as_bytes() {
        return None;
    }
    file.take(FILE_BYTES_MAX).read_to_end(&mut mark).ok()?;
    String::from_utf8(mark).ok()
}

fn read_up_to(file: &mut std::fs::File, buffer: &mut [u8]) -> Option<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    Some(got)
}
