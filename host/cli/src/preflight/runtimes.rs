//! Checks which container tools a machine has, and whether they read CDI files from the daemon's directory: by their config files, by the
//! answers of their services, and by the kubelet's report of its runtime. Runs no program.

mod containerd;
mod docker;
mod engine;
mod podman;

use std::io;
use std::path::{Path, PathBuf};

use semver::Version;
use toml::Value;

use super::{Check, CheckStatus, is_same};
use nodedock_base::error::chain;
use nodedock_base::file;

pub(super) use containerd::{kubelets, talos};

/// Directories in which tools look unless their config says otherwise.
const USUAL: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Directories of programs below a root.
const PROGRAMS: [&str; 7] = [
    "usr/local/sbin",
    "usr/local/bin",
    "usr/sbin",
    "usr/bin",
    "sbin",
    "bin",
    "snap/bin",
];
/// The name of `nodedock runtime` in the configs of Docker and podman.
const RUNTIME: &str = "nodedock";
const CRIO: &str = "CRI-O";

/// Checks the tools that are seen below a root. Pods do not use Docker and podman, whose faults are warnings with Kubernetes.
pub(super) async fn checks(root: &Path, cdi: &Path, has_kubernetes: bool) -> Vec<Check> {
    let mut checks = containerd::checks(root, cdi);
    checks.extend(crio(root, cdi).unwrap_or_else(Some));
    let docker = docker::check(root, cdi).await.unwrap_or_else(Some);
    let podman = podman::check(root, cdi).await.unwrap_or_else(Some);
    for check in docker.into_iter().chain(podman) {
        checks.push(match has_kubernetes {
            true => without_pods(check),
            false => check,
        });
    }
    if checks.is_empty() {
        let finding = format!(
            "none found below {}: looked for containerd, k3s, RKE2, k0s, microk8s, Talos, CRI-O, Docker and podman; those of a node are not seen from a pod",
            root.display()
        );
        checks.push(Check::new("container tools", CheckStatus::Unknown, finding));
    }
    checks
}

/// Makes a warning of the fault of a tool that runs no pods.
fn without_pods(check: Check) -> Check {
    match check.verdict {
        CheckStatus::Failed => Check::new(
            check.name,
            CheckStatus::Warning,
            format!("{}; pods do not use it", check.finding),
        ),
        _ => check,
    }
}

/// The settings about CDI in a tool's config. `None`: no such setting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct CdiSettings {
    enabled: Option<bool>,
    /// It is off in releases of the runtime from before this config's successor.
    depends: bool,
    directories: Option<Vec<PathBuf>>,
}

/// Puts the settings of files together, of which later ones win.
fn merged(configs: &[(PathBuf, Value)], read: fn(&Value) -> CdiSettings) -> CdiSettings {
    configs
        .iter()
        .map(|(_, config)| read(config))
        .reduce(|before, here| CdiSettings {
            enabled: here.enabled.or(before.enabled),
            // One file that older releases cannot read is enough.
            depends: here.depends && before.depends,
            directories: here.directories.or(before.directories),
        })
        .unwrap_or_default()
}

/// Judges settings that are in files, and are changed in the file `edit`.
fn judged(
    name: &'static str,
    files: &str,
    edit: &str,
    settings: &CdiSettings,
    root: &Path,
    cdi: &Path,
) -> Check {
    if settings.enabled == Some(false) {
        return Check::new(
            name,
            CheckStatus::Failed,
            format!("CDI is off in {files}: set enable_cdi = true in {edit}"),
        );
    }
    let directories = settings.directories.clone().unwrap_or_else(usual);
    let shown = listed(&directories);
    match is_read(&directories, root, cdi) {
        true if settings.depends && settings.enabled.is_none() => Check::new(
            name,
            CheckStatus::Warning,
            format!(
                "CDI is off in releases before 2.0, and {files} does not set it: set enable_cdi = true in {edit}"
            ),
        ),
        true => Check::new(
            name,
            CheckStatus::Ok,
            format!("reads CDI files in {shown} ({files})"),
        ),
        false => Check::new(
            name,
            CheckStatus::Failed,
            format!(
                "reads CDI files in {shown} ({files}), and not in {}: set cdi_spec_dirs in {edit}",
                cdi.display()
            ),
        ),
    }
}

fn usual() -> Vec<PathBuf> {
    USUAL.iter().map(PathBuf::from).collect()
}

/// Returns whether one of the directories is the daemon's. They are the node's, which is below the root.
fn is_read(directories: &[PathBuf], root: &Path, cdi: &Path) -> bool {
    directories
        .iter()
        .any(|path| is_same(&root.join(path.strip_prefix("/").unwrap_or(path)), cdi))
}

fn listed(paths: &[PathBuf]) -> String {
    paths
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Remarks on the runtime that gives containers devices by the names of classes.
fn runtime_remark(is_configured: bool, default: Option<&str>) -> &'static str {
    match is_configured {
        _ if default == Some(RUNTIME) => "; its default runtime is nodedock",
        true => "; it has the runtime nodedock",
        false => "; it has no runtime nodedock",
    }
}

/// Returns the first two numbers of a tool's version, such as `26.1.5+dfsg1`.
fn release(version: &str) -> Option<(u64, u64)> {
    let mut numbers = version.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Returns the first of the paths that is there. The error is the finding that one cannot be looked at.
fn first_of(
    name: &'static str,
    paths: impl IntoIterator<Item = PathBuf>,
) -> Result<Option<PathBuf>, Check> {
    for path in paths {
        match file::metadata(&path) {
            Ok(Some(_)) => return Ok(Some(path)),
            Ok(None) => {}
            Err(error) => return Err(unseen(name, &path, &error)),
        }
    }
    Ok(None)
}

/// Returns the paths at which a program may be.
fn programs(root: &Path, program: &str) -> Vec<PathBuf> {
    PROGRAMS
        .iter()
        .map(|directory| root.join(directory).join(program))
        .collect()
}

fn unseen(name: &'static str, path: &Path, error: &io::Error) -> Check {
    Check::new(
        name,
        CheckStatus::Unknown,
        format!("{}: {error}", path.display()),
    )
}

/// Reads those of a tool's TOML files that are there. The error is the finding that one cannot be read.
fn read_all(
    name: &'static str,
    files: impl IntoIterator<Item = PathBuf>,
) -> Result<Vec<(PathBuf, Value)>, Check> {
    let mut configs = Vec::new();
    for file in files {
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(unseen(name, &file, &error)),
        };
        match text.parse::<toml::Table>() {
            Ok(config) => configs.push((file, Value::Table(config))),
            Err(error) => {
                let finding = format!("{} is not TOML: {}", file.display(), chain(&error));
                return Err(Check::new(name, CheckStatus::Unknown, finding));
            }
        }
    }
    Ok(configs)
}

fn files_of(configs: &[(PathBuf, Value)]) -> String {
    configs
        .iter()
        .map(|(file, _)| file.display().to_string())
        .collect::<Vec<_>>()
        .join(", ")
}

/// Files of a directory, in the order in which the later ones win.
fn below(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files: Vec<_> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    files.sort();
    Ok(files)
}

/// Returns the files of a directory with an ending, as `below` does. The error is the finding that it cannot be read.
fn below_with(name: &'static str, directory: &Path, ending: &str) -> Result<Vec<PathBuf>, Check> {
    let files = below(directory).map_err(|error| unseen(name, directory, &error))?;
    Ok(files
        .into_iter()
        .filter(|file| file.extension().is_some_and(|found| found == ending))
        .collect())
}

fn paths(list: &Value) -> Option<Vec<PathBuf>> {
    Some(
        list.as_array()?
            .iter()
            .filter_map(Value::as_str)
            .map(PathBuf::from)
            .collect(),
    )
}

fn crio(root: &Path, cdi: &Path) -> Result<Option<Check>, Check> {
    let drop_ins = root.join("etc/crio/crio.conf.d");
    let mut files = vec![root.join("etc/crio/crio.conf")];
    files.extend(below(&drop_ins).map_err(|error| unseen(CRIO, &drop_ins, &error))?);
    let configs = read_all(CRIO, files)?;
    if configs.is_empty() {
        return Ok(None);
    }
    let settings = merged(&configs, of_crio);
    let edit = "/etc/crio/crio.conf.d";
    Ok(Some(judged(
        CRIO,
        &files_of(&configs),
        edit,
        &settings,
        root,
        cdi,
    )))
}

fn of_crio(config: &Value) -> CdiSettings {
    let runtime = config.get("crio").and_then(|crio| crio.get("runtime"));
    CdiSettings {
        enabled: None,
        depends: false,
        directories: runtime.and_then(|runtime| paths(runtime.get("cdi_spec_dirs")?)),
    }
}

/// Judges the runtime that a Node object names: `containerd://2.1.0`.
pub(super) fn of_node(runtime: &str) -> Check {
    const NAME: &str = "container runtime";
    let (name, version) = runtime.split_once("://").unwrap_or((runtime, ""));
    let Ok(found) = Version::parse(version.trim_start_matches('v')) else {
        return Check::new(
            NAME,
            CheckStatus::Unknown,
            format!("the Node object names {runtime:?}"),
        );
    };
    let (verdict, words) = match name {
        "containerd" if found < Version::new(1, 7, 0) => (CheckStatus::Failed, "CDI needs 1.7"),
        "containerd" if found < Version::new(2, 0, 0) => (
            CheckStatus::Warning,
            "CDI is off unless enable_cdi = true is in its config",
        ),
        "cri-o" if found < Version::new(1, 23, 0) => (CheckStatus::Failed, "CDI needs 1.23"),
        "containerd" | "cri-o" => (CheckStatus::Ok, "reads CDI files"),
        _ => (CheckStatus::Unknown, "see its documentation for CDI"),
    };
    Check::new(NAME, verdict, format!("{name} {found}: {words}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn found(name: &str, path: &str, text: &str) -> Option<Check> {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
        let checks = checks(root.path(), &root.path().join("var/run/cdi"), false).await;
        checks.into_iter().find(|check| check.name == name)
    }

    #[tokio::test]
    async fn machine_without_tools_is_unknown() {
        let root = tempfile::tempdir().unwrap();
        let checks = checks(root.path(), root.path(), false).await;
        assert_eq!(
            checks.iter().map(|check| check.verdict).collect::<Vec<_>>(),
            [CheckStatus::Unknown]
        );
        assert!(checks[0].finding.contains("none found"), "{checks:?}");
    }

    #[tokio::test]
    async fn tools_without_pods_only_warn() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("etc/docker")).unwrap();
        std::fs::write(root.path().join("etc/docker/daemon.json"), "{").unwrap();
        for (has_kubernetes, verdict) in
            [(false, CheckStatus::Failed), (true, CheckStatus::Warning)]
        {
            let checks = checks(root.path(), root.path(), has_kubernetes).await;
            assert_eq!(checks[0].verdict, verdict, "{checks:?}");
        }
    }

    #[test]
    fn release_is_two_numbers() {
        for (version, numbers) in [
            ("26.1.5+dfsg1", Some((26, 1))),
            ("24.0.7-0ubuntu2~22.04.1", Some((24, 0))),
            ("5.5", Some((5, 5))),
            ("dev", None),
            ("", None),
        ] {
            assert_eq!(release(version), numbers, "{version}");
        }
    }

    #[tokio::test]
    async fn runtime_config_decides_cdi_verdict() {
        const FILE: &str = "etc/containerd/config.toml";
        let new = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\n";
        let old = "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\n";
        for (file, text, verdict) in [
            (FILE, "version = 3\n".to_owned(), CheckStatus::Ok),
            (FILE, "version = 2\n".to_owned(), CheckStatus::Warning),
            (
                FILE,
                format!("{old}enable_cdi = false\n"),
                CheckStatus::Failed,
            ),
            (FILE, format!("{old}enable_cdi = true\n"), CheckStatus::Ok),
            (
                FILE,
                format!("{new}enable_cdi = false\n"),
                CheckStatus::Failed,
            ),
            (
                FILE,
                format!("{new}cdi_spec_dirs = ['/etc/cdi']\n"),
                CheckStatus::Failed,
            ),
            (
                FILE,
                format!("{new}cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']\n"),
                CheckStatus::Ok,
            ),
            (FILE, "version = ".to_owned(), CheckStatus::Unknown),
        ] {
            let check = found("containerd", file, &text).await.unwrap();
            assert_eq!(check.verdict, verdict, "{text}: {check:?}");
        }
        let crio = "[crio.runtime]\ncdi_spec_dirs = ['/opt/cdi']\n";
        assert_eq!(
            found("CRI-O", "etc/crio/crio.conf.d/10-cdi.conf", crio)
                .await
                .unwrap()
                .verdict,
            CheckStatus::Failed
        );
        assert_eq!(
            found("CRI-O", "etc/crio/crio.conf", "[crio]\n")
                .await
                .unwrap()
                .verdict,
            CheckStatus::Ok
        );
        assert_eq!(
            found("CRI-O", FILE, new).await,
            None,
            "no config, no finding"
        );
    }

    #[test]
    fn imported_config_files_are_read() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("etc/containerd");
        std::fs::create_dir_all(directory.join("conf.d")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
        let verdict =
            || containerd::checks(root.path(), &root.path().join("var/run/cdi"))[0].verdict;
        write(
            "conf.d/99-vendor.toml",
            "version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nenable_cdi = true\n",
        );
        for (imports, expected) in [
            ("[]", CheckStatus::Warning),
            ("['/etc/containerd/conf.d/*.toml']", CheckStatus::Ok),
            ("['conf.d/99-*.toml']", CheckStatus::Ok),
            ("['/etc/other/*.toml', '[', 7]", CheckStatus::Warning),
        ] {
            write(
                "config.toml",
                &format!("version = 2\nimports = {imports}\n"),
            );
            assert_eq!(verdict(), expected, "{imports}");
        }
    }

    #[test]
    fn runtime_version_decides_its_verdict() {
        for (runtime, verdict) in [
            ("containerd://2.1.0", CheckStatus::Ok),
            ("containerd://1.7.24", CheckStatus::Warning),
            ("containerd://1.6.9", CheckStatus::Failed),
            ("cri-o://1.33.1", CheckStatus::Ok),
            ("cri-o://1.22.0", CheckStatus::Failed),
            ("docker://28.0.0", CheckStatus::Unknown),
            ("", CheckStatus::Unknown),
            ("containerd://", CheckStatus::Unknown),
        ] {
            assert_eq!(of_node(runtime).verdict, verdict, "{runtime}");
        }
    }
}
