//! Versions of the driver `scripted`: the same code in files of different digests, each with a script.

use serde_json::{Value, json};

use crate::drivers::{Form, digest, side_file, version, wasm};
use crate::{Daemon, Root, compose};

pub const FILE: &str = "scripted.wasm";
pub const NAME: &str = "scripted.nodedock.dev";
const POOL: &str = "script";

/// The file of a version.
pub fn file(tag: &str) -> Vec<u8> {
    version(wasm("scripted", Form::Core), tag)
}

/// A script with devices for any claim `device-N`; `generation` tells a test that it is in use.
pub fn script(generation: u32) -> Value {
    json!({"devices": 64, "generation": generation})
}

/// The same, that does `word` with unprepares of claims.
pub fn with_unprepare(mut script: Value, claims: &[&str], word: &str) -> Value {
    for claim in claims {
        script["unprepare"][*claim] = word.into();
    }
    script
}

/// A claim for the device of its name.
pub fn claim(name: &str) -> nodedock_proto::node::v1::Claim {
    compose::claim(name, &[&format!("{NAME}/{POOL}/{name}")])
}

impl Root {
    pub fn drop_in_script(&self, script: &Value) {
        // JSON is YAML.
        self.drop_in("scripted.config.yaml", script.to_string());
    }
}

impl Daemon {
    /// Swaps in a version with its script and returns its digest when both are in use. The file comes first: the script is not for
    /// the version before it.
    pub async fn swap(&self, tag: &str, script: &Value) -> String {
        let file = file(tag);
        self.drop_in("scripted.grant.yaml", side_file("scripted", "grant"));
        self.drop_in(FILE, &file);
        let digest = digest(&file);
        self.until_driver(FILE, |driver| driver.digest == digest && driver.state == "serving").await;
        self.drop_in_script(script);
        self.until_device(POOL, &format!("generation-{}", script["generation"]), true).await;
        digest
    }
}
