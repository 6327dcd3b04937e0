//! Files that people write: grants, configs, manifests.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::config::ConfigFile;
use nodedock_core::checkpoint::fuzz::{check_kept, same};
use nodedock_core::manifest::{self, Objects};
use nodedock_model::grant::{self, Effective, Grant};
use nodedock_model::limit::{CDI_DIRECTORIES_MAX, SIDE_FILE_BYTES_MAX};
use nodedock_model::{Claim, ClaimRecord, ClaimState, PodRecord, PodRequest, SideFileError};

/// A grant: it covers what it lists, and is the same after it was written. An error names an existing line.
pub fn grant(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    match Grant::parse(text) {
        Ok(grant) => check_grant(&grant, text),
        Err(SideFileError::At {
            line,
            column,
            message,
        }) => {
            assert!(
                (1..=lines(text)).contains(&line) && column >= 1,
                "line {line}, column {column}: {message}"
            );
            return false;
        }
        Err(SideFileError::TooLarge(_) | SideFileError::Whole(_)) => return false,
    }
    true
}

fn check_grant(grant: &Grant, text: &str) {
    let allowed = &grant.allowed;
    allowed.check().expect("what is granted can be requested");
    let mut requested = grant.limits.clone();
    // The other limits cannot be requested.
    requested.retain(|key, _| key.can_be_requested());
    assert_eq!(
        grant::missing(allowed, &requested, grant),
        [""; 0],
        "what is granted is granted"
    );
    let effective = Effective::new(allowed, grant).expect("what was read can be used");
    assert!(
        allowed
            .sysfs_read
            .iter()
            .all(|glob| effective.allows_sysfs_glob(glob))
    );
    let yaml = grant::to_yaml("gpu.example.com", text, allowed, &requested);
    if yaml.len() as u64 <= SIDE_FILE_BYTES_MAX {
        let again = Grant::parse(&yaml).expect("a grant that was written can be read");
        let expected = Grant {
            limits: requested,
            ..grant.clone()
        };
        assert_eq!(again, expected, "another grant came back from {yaml}");
    }
}

/// Lines as YAML counts them, with the one behind the last line end, where a text ends that is not complete.
fn lines(text: &str) -> u64 {
    let ends = text.replace("\r\n", "\n").matches(['\n', '\r']).count();
    ends as u64 + 1
}

/// A config: the daemon's has values within their ranges; a driver's becomes JSON that any reader of JSON takes.
pub fn config(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    let of_daemon = ConfigFile::parse(text, Path::new("nodedock.yaml"));
    if let Ok(file) = &of_daemon {
        check_config(file);
    }
    let of_driver = nodedock_wasm::driver_config::driver_config(text);
    if let Ok(json) = &of_driver {
        check_driver_config(json);
    }
    of_daemon.is_ok() || of_driver.is_ok()
}

fn check_config(file: &ConfigFile) {
    let directories = file.cdi_spec_dirs.as_deref().unwrap_or_default();
    assert!(
        directories.len() <= CDI_DIRECTORIES_MAX
            && directories.iter().all(|path| path.is_absolute())
    );
    let within =
        |value: Option<u64>, min, max| value.is_none_or(|value| (min..=max).contains(&value));
    assert!(within(file.claims.exclusive_wait_ms, 0, 60_000), "{file:?}");
    assert!(
        within(file.claims.call_deadline_ms, 100, 300_000),
        "{file:?}"
    );
}

fn check_driver_config(json: &str) {
    let value: Value = serde_json::from_str(json).expect("a driver's config is JSON");
    assert!(value.is_object(), "{json}");
    let again: Value =
        serde_json::from_str(&value.to_string()).expect("JSON that was written can be read");
    assert!(same(&value, &again), "{again} instead of {value}");
}

/// A manifest: what was read of claims and pods is the same when it comes back from the checkpoint.
pub fn manifest(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    let Ok(Objects { claims, pods, .. }) = manifest::parse(text, "input") else {
        return false;
    };
    let taken = !claims.is_empty() || !pods.is_empty();
    claims.into_iter().for_each(check_claim);
    pods.into_iter().for_each(check_pod);
    taken
}

fn check_claim(claim: Claim) {
    let Some(allocation) = claim.allocation else {
        return;
    };
    for config in &allocation.configs {
        serde_json::from_str::<Value>(&config.parameters).expect("parameters are JSON");
    }
    check_kept(&ClaimRecord {
        id: claim.id,
        state: ClaimState::Preparing,
        boot_id: "boot".to_owned(),
        pods: [].into(),
        allocation,
        annotations: claim.annotations,
        drivers: BTreeMap::new(),
        kubelet: None,
        holds: Vec::new(),
        resource: None,
        releasing: None,
        timeline: [].into(),
        unknown: BTreeMap::new(),
    });
}

fn check_pod(request: PodRequest) {
    let native = |name: &str| {
        name.split_once('/')
            .is_none_or(|(domain, _)| domain.ends_with("kubernetes.io"))
    };
    for container in &request.containers {
        assert!(
            container
                .resources
                .iter()
                .all(|(name, count)| *count > 0 && !native(name.as_str()))
        );
    }
    check_kept(&PodRecord {
        pod: request.pod,
        claims: [].into(),
        containers: request.containers,
        unknown: BTreeMap::new(),
    });
}
