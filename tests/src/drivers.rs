//! Drivers for the daemon's directory.

use std::collections::BTreeSet;
use std::path::PathBuf;

use nodedock_wasm::DriverFile;

use crate::until::until_path;
use crate::{Root, places};

pub const MOCK_GPU: &str = "mock-gpu";
pub const MOCK_GPU_FILE: &str = "mock-gpu.wasm";
pub const MOCK_GPU_NAME: &str = "mock-gpu.nodedock.dev";
pub const DEVICE_NODES: &str = "device-nodes";
pub const DEVICE_NODES_FILE: &str = "device-nodes.wasm";
pub const DEVICE_NODES_NAME: &str = "device-nodes.nodedock.dev";

/// The two forms in which a driver is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `wasm32-unknown-unknown`.
    Core,
    /// `wasm32-wasip2`.
    Component,
}

/// The bytes of an example driver.
pub fn wasm(name: &str, form: Form) -> Vec<u8> {
    let dir = match form {
        Form::Core => places::drivers(),
        Form::Component => places::drivers().join("wasip2"),
    };
    let path = dir.join(format!("{name}.wasm"));
    let read = std::fs::read(&path);
    read.unwrap_or_else(|error| {
        panic!(
            "read {}: {error}; `cargo xtask drivers` builds it",
            path.display()
        )
    })
}

/// The same driver in a file of another digest, as a new version is: with a section that no host reads.
pub fn version(mut file: Vec<u8>, tag: &str) -> Vec<u8> {
    const NAME: &str = "version";
    let length = u8::try_from(1 + NAME.len() + tag.len())
        .ok()
        .filter(|length| *length < 0x80);
    let name_length = u8::try_from(NAME.len()).expect("the name is short");
    file.extend([0, length.expect("the tag is short"), name_length]);
    file.extend(NAME.bytes().chain(tag.bytes()));
    file
}

/// The digest of a driver's file, as the daemon shows it.
pub fn digest(file: &[u8]) -> String {
    DriverFile {
        name: String::new(),
        bytes: file.to_vec().into(),
    }
    .digest()
}

/// The grant or config (`kind`) that is beside an example driver's source.
pub fn side_file(name: &str, kind: &str) -> String {
    let path = places::examples()
        .join(name)
        .join(format!("{name}.{kind}.yaml"));
    std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("read {}: {error}", path.display()))
}

impl Root {
    pub fn driver_path(&self, file: &str) -> PathBuf {
        self.drivers().join(file)
    }

    /// Puts a file into the drivers directory at once, as careful tools do.
    pub fn drop_in(&self, file: &str, bytes: impl AsRef<[u8]>) {
        let temporary = self.driver_path(&format!(".{file}.tmp"));
        std::fs::write(&temporary, bytes).expect("write into the drivers directory");
        std::fs::rename(temporary, self.driver_path(file))
            .expect("rename in the drivers directory");
    }

    /// Copies a file into the drivers directory as `cp` does.
    pub fn copy_in(&self, file: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.driver_path(file), bytes).expect("write into the drivers directory");
    }

    /// Digests of the drivers' files that are kept for what they prepared.
    pub fn kept(&self) -> BTreeSet<String> {
        let entries =
            std::fs::read_dir(self.kept_drivers()).expect("the daemon makes the directory");
        let names = entries.map(|entry| entry.expect("list a directory").file_name().into_string());
        let names = names.map(|name| name.expect("names of ours are text"));
        names
            .filter_map(|name| {
                name.strip_suffix(".wasm")
                    .map(|stem| format!("sha256:{stem}"))
            })
            .collect()
    }

    /// Waits until exactly these are kept.
    pub async fn until_kept(&self, wanted: &[&str]) {
        let wanted: BTreeSet<_> = wanted.iter().map(|digest| (*digest).to_owned()).collect();
        let is_wanted = || match self.kept() {
            kept if kept == wanted => Ok(()),
            kept => Err(format!("{kept:?}")),
        };
        until_path(
            &self.kept_drivers(),
            &format!("{wanted:?} are kept"),
            is_wanted,
        )
        .await;
    }

    pub fn take_out(&self, file: &str) {
        std::fs::remove_file(self.driver_path(file))
            .expect("remove a file of the drivers directory");
    }

    /// An example driver with its grant and its config.
    pub fn install(&self, name: &str, form: Form) {
        self.drop_in(&format!("{name}.grant.yaml"), side_file(name, "grant"));
        self.drop_in(&format!("{name}.config.yaml"), side_file(name, "config"));
        self.drop_in(&format!("{name}.wasm"), wasm(name, form));
    }

    /// The simulated GPUs, with a config of the test's own.
    pub fn install_gpus(&self, config: &str) {
        self.drop_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
        self.drop_in("mock-gpu.config.yaml", config);
        self.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    }
}
