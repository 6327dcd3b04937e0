//! The kubelet's directories, its Pods API, the feature gates of its config where that can be read, and whether mounts of the node reach the
//! daemon.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{Check, CheckStatus, writable};
use nodedock_base::error::chain;
use nodedock_base::file;

/// Directories of a kubelet in which the daemon has sockets.
const DIRECTORIES: [&str; 3] = ["plugins_registry", "plugins", "device-plugins"];
/// The socket of its Pods API.
const PODS_API: &str = "pods-api/pods-api.sock";
const MOUNTS: &str = "/proc/self/mountinfo";
const PROPAGATION: &str = "mount propagation";
/// Gate without which a kubelet has no DRA.
const DRA: &str = "DynamicResourceAllocation";

pub(super) fn checks(root: &Path) -> Vec<Check> {
    // A kubelet sets it in every container.
    let is_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    let propagation = match std::fs::read_to_string(MOUNTS) {
        Ok(mounts) => is_pod.then(|| propagation(&mounts)).flatten(),
        Err(error) => is_pod.then(|| {
            Check::new(
                PROPAGATION,
                CheckStatus::Unknown,
                format!("{MOUNTS}: {error}"),
            )
        }),
    };
    let checks = [
        Some(directories(root)),
        Some(pods_api(root)),
        gates(&root.join("config.yaml")),
        propagation,
    ];
    checks.into_iter().flatten().collect()
}

fn directories(root: &Path) -> Check {
    const NAME: &str = "kubelet directories";
    let paths = DIRECTORIES.map(|name| root.join(name));
    let mut missing = Vec::new();
    for path in &paths {
        match file::metadata(path) {
            Ok(Some(found)) if found.is_dir() => {}
            Ok(_) => missing.push(path.display().to_string()),
            Err(error) => {
                return Check::new(
                    NAME,
                    CheckStatus::Unknown,
                    format!("{}: {error}", path.display()),
                );
            }
        }
    }
    if !missing.is_empty() {
        let missing = missing.join(", ");
        let advice = "is a kubelet running, and is --kubelet-root its --root-dir?";
        return Check::new(
            NAME,
            CheckStatus::Failed,
            format!("missing: {missing}; {advice}"),
        );
    }
    let found = paths.iter().map(|path| writable(NAME, path));
    let all = Check::new(
        NAME,
        CheckStatus::Ok,
        format!("{} can be written", root.display()),
    );
    found
        .into_iter()
        .find(|check| check.verdict != CheckStatus::Ok)
        .unwrap_or(all)
}

/// Checks whether the kubelet lists its pods itself. Without that the API server lists them.
fn pods_api(root: &Path) -> Check {
    const NAME: &str = "kubelet Pods API";
    let path = root.join(PODS_API);
    let shown = path.display();
    match file::metadata(&path) {
        Ok(Some(_)) => Check::new(NAME, CheckStatus::Ok, format!("{shown} is there")),
        Ok(None) => Check::new(
            NAME,
            CheckStatus::Ok,
            format!(
                "there is no {shown}: the API server lists the pods of the node. Kubelets have it since 1.37, or with the feature gate PodsAPI since 1.36"
            ),
        ),
        Err(error) => Check::new(NAME, CheckStatus::Unknown, format!("{shown}: {error}")),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct KubeletConfig {
    #[serde(default)]
    feature_gates: BTreeMap<String, bool>,
}

/// `None`: there is no config where kubeadm and others put it.
fn gates(path: &Path) -> Option<Check> {
    const NAME: &str = "kubelet feature gates";
    let shown = path.display();
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => {
            return Some(Check::new(
                NAME,
                CheckStatus::Unknown,
                format!("{shown}: {error}"),
            ));
        }
    };
    let config: KubeletConfig = match serde_saphyr::from_str(&text) {
        Ok(config) => config,
        Err(error) => {
            return Some(Check::new(
                NAME,
                CheckStatus::Unknown,
                format!("{shown}: {}", chain(&error)),
            ));
        }
    };
    let set: Vec<_> = config
        .feature_gates
        .iter()
        .map(|(gate, on)| format!("{gate}={on}"))
        .collect();
    Some(match config.feature_gates.get(DRA) {
        Some(false) => Check::new(
            NAME,
            CheckStatus::Failed,
            format!("{shown} has {DRA}=false: no claim is prepared"),
        ),
        _ if set.is_empty() => Check::new(NAME, CheckStatus::Ok, format!("{shown} sets none")),
        _ => Check::new(
            NAME,
            CheckStatus::Ok,
            format!("{shown} sets {}", set.join(", ")),
        ),
    })
}

/// Checks whether the `/dev` of a pod receives what is mounted later below the node's. `None`: it is not a mount.
fn propagation(mountinfo: &str) -> Option<Check> {
    let mut mounts = mountinfo.lines().filter_map(Mount::parse);
    // Of several on one another, the last is seen.
    let dev = mounts.rfind(|mount| mount.point == Path::new("/dev"))?;
    Some(match dev.propagates {
        true => Check::new(
            PROPAGATION,
            CheckStatus::Ok,
            "/dev receives mounts of the node",
        ),
        false => Check::new(
            PROPAGATION,
            CheckStatus::Warning,
            "/dev does not receive mounts that the node gets later: mount it with mountPropagation: HostToContainer",
        ),
    })
}

/// A line of `/proc/self/mountinfo`: see proc(5).
struct Mount {
    point: PathBuf,
    /// It receives mounts of its peer group or its master.
    propagates: bool,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split(' ');
        let point = PathBuf::from(fields.nth(4)?);
        let mut optional = fields.skip(1).take_while(|field| *field != "-");
        let propagates =
            optional.any(|field| field.starts_with("shared:") || field.starts_with("master:"));
        Some(Self { point, propagates })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_kubelet_directory_fails_check() {
        let root = tempfile::tempdir().unwrap();
        for name in ["plugins_registry", "plugins"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let missing = directories(root.path());
        assert!(
            missing.verdict == CheckStatus::Failed && missing.finding.contains("/device-plugins;"),
            "{missing:?}"
        );
        std::fs::create_dir(root.path().join("device-plugins")).unwrap();
        assert_eq!(directories(root.path()).verdict, CheckStatus::Ok);
    }

    #[test]
    fn pods_api_found_by_its_socket() {
        let root = tempfile::tempdir().unwrap();
        let without = pods_api(root.path());
        assert!(
            without.verdict == CheckStatus::Ok && without.finding.contains("since 1.37"),
            "{without:?}"
        );
        std::fs::create_dir(root.path().join("pods-api")).unwrap();
        std::fs::write(root.path().join(PODS_API), "").unwrap();
        let with = pods_api(root.path());
        assert!(
            with.verdict == CheckStatus::Ok && with.finding.ends_with("pods-api.sock is there"),
            "{with:?}"
        );
        let circular = root.path().join("circular");
        std::os::unix::fs::symlink("circular", &circular).unwrap();
        assert_eq!(pods_api(&circular).verdict, CheckStatus::Unknown);
    }

    #[test]
    fn disabled_required_feature_gate_fails_check() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("config.yaml");
        assert_eq!(gates(&path), None);
        for (text, verdict, words) in [
            ("kind: KubeletConfiguration\n", CheckStatus::Ok, "sets none"),
            (
                "featureGates:\n  PodsAPI: true\n  A: false\n",
                CheckStatus::Ok,
                "A=false, PodsAPI=true",
            ),
            (
                "featureGates: {DynamicResourceAllocation: false}\n",
                CheckStatus::Failed,
                "no claim is prepared",
            ),
            ("featureGates: [", CheckStatus::Unknown, "config.yaml: "),
            (
                "featureGates: {A: some}\n",
                CheckStatus::Unknown,
                "config.yaml: ",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let check = gates(&path).unwrap();
            assert!(
                check.verdict == verdict && check.finding.contains(words),
                "{text}: {check:?}"
            );
        }
    }

    #[test]
    fn private_dev_mount_is_a_warning() {
        let root = "30 25 0:26 / / rw,relatime master:300 - overlay overlay rw\n".to_owned();
        let dev =
            |optional: &str| format!("31 30 0:5 / /dev rw,nosuid {optional}- devtmpfs udev rw\n");
        let verdict = |text: String| propagation(&text).map(|check| check.verdict);
        assert_eq!(
            verdict(root.clone() + &dev("master:2 ")),
            Some(CheckStatus::Ok)
        );
        assert_eq!(
            verdict(root.clone() + &dev("master:2 ") + &dev("")),
            Some(CheckStatus::Warning)
        );
        assert_eq!(verdict(root), None);
        assert_eq!(verdict("x y\n\n".to_owned()), None);
    }
}
