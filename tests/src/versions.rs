//! The driver `scripted`, with its script; and versions of it: the same code in files of different digests.

use scripted::{Command, POOL, Script};

use crate::drivers::{Form, digest, side_file, version, wasm};
use crate::{NodeApi, Root, compose};

pub use scripted::NAME;

pub const FILE: &str = "scripted.wasm";

/// The file of a version.
pub fn file(tag: &str) -> Vec<u8> {
    version(wasm("scripted", Form::Core), tag)
}

/// A script with devices for any claim `device-N`; `generation` tells a test that it is in use.
pub fn script(generation: u32) -> Script {
    Script {
        devices: 64,
        generation,
        ..Script::default()
    }
}

/// The same, that does `word` with unprepares of claims.
pub fn with_unprepare(mut script: Script, claims: &[&str], word: Command) -> Script {
    script
        .unprepare
        .extend(claims.iter().map(|claim| ((*claim).to_owned(), word)));
    script
}

/// A claim for the device of its name.
pub fn claim(name: &str) -> nodedock_proto::node::v1::Claim {
    compose::claim(name, &[&format!("{NAME}/{POOL}/{name}")])
}

/// Returns the calls of the driver from its lines in a log, such as `prepare ok,skip`.
pub fn logged_calls(log: &str) -> impl Iterator<Item = String> {
    let calls = log
        .lines()
        .filter_map(|line| Some(line.split_once("asked to ")?.1));
    calls.map(|call| {
        call.split_whitespace()
            .take(2)
            .collect::<Vec<_>>()
            .join(" ")
    })
}

impl Root {
    pub fn drop_in_script(&self, script: &Script) {
        // JSON is YAML.
        self.drop_in(
            "scripted.config.yaml",
            serde_json::to_vec(script).expect("a script is JSON"),
        );
    }

    /// The driver with its grant and a script.
    pub fn install_scripted(&self, script: &Script) {
        self.drop_in("scripted.grant.yaml", side_file("scripted", "grant"));
        self.drop_in_script(script);
        self.drop_in(FILE, wasm("scripted", Form::Core));
    }
}

impl NodeApi {
    /// Swaps in a version with its script and returns its digest when both are in use. The file comes first: the script is not for
    /// the version before it.
    pub async fn swap(&self, tag: &str, script: &Script) -> String {
        let file = file(tag);
        self.drop_in("scripted.grant.yaml", side_file("scripted", "grant"));
        self.drop_in(FILE, &file);
        let digest = digest(&file);
        self.until_driver(FILE, |driver| {
            driver.digest == digest && driver.state == "serving"
        })
        .await;
        self.drop_in_script(script);
        self.until_device(POOL, &format!("generation-{}", script.generation), true)
            .await;
        digest
    }
}
