//! `nodedock preflight`: whether a node has what the daemon needs, before it runs. Looks only, and changes nothing.

mod kubelet;
mod runtimes;

use std::fs::Metadata;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::output::{self, Column, Format, Row};
use super::{CommandError, Location};
use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::paths::Paths;
use nodedock_core::hardware::Hardware;
use nodedock_kube::client::{ApiError, KubeClient};
use nodedock_kube::extended_resources::{self, Decision};
use nodedock_kube::preflight::{self, MissingRight};
use nodedock_wasm::driver_image::DriverImage;
use nodedockd::app;
use nodedockd::config::{Config, Flags, KubernetesConfig};

#[derive(Args)]
pub(super) struct PreflightArgs {
    #[command(flatten)]
    flags: Flags,
    /// Form of the output
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckStatus {
    Ok,
    /// It works in part, or may not work.
    Warning,
    Failed,
    /// It cannot be seen from here.
    Unknown,
}

impl CheckStatus {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Check {
    name: &'static str,
    verdict: CheckStatus,
    /// The finding, and the remedy.
    finding: String,
}

impl Check {
    fn new(name: &'static str, verdict: CheckStatus, finding: impl Into<String>) -> Self {
        Self {
            name,
            verdict,
            finding: finding.into(),
        }
    }
}

impl Row for Check {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CHECK", |check| check.name.to_owned()),
        ("RESULT", |check| check.verdict.as_str().to_owned()),
        ("FINDING", |check| check.finding.clone()),
    ];
}

/// Fails if a check did.
pub(super) async fn run(location: &Location, args: PreflightArgs) -> Result<()> {
    let checks = checks(&nodedockd::program::config(location, args.flags)?).await;
    output::print(args.output, &checks, || {
        output::table(args.output, &checks, "")
    })?;
    CommandError::unless_done(
        checks
            .iter()
            .all(|check| check.verdict != CheckStatus::Failed),
    )
}

/// Carries out all checks for a daemon of this configuration.
async fn checks(config: &Config) -> Vec<Check> {
    let mut checks = vec![
        writable("CDI directory", &config.paths.cdi),
        spec_directories(&config.paths),
    ];
    let has_kubernetes = config.kubernetes.is_some();
    checks.extend(runtimes::checks(&config.root, &config.paths.cdi, has_kubernetes).await);
    checks.push(state_directory(&config.paths, &config.root));
    checks.push(drivers_directory(&config.paths.drivers));
    checks.extend(config.drivers.images.iter().map(driver_image));
    checks.push(hardware(&config.hardware));
    match &config.kubernetes {
        None => checks.push(Check::new(
            "Kubernetes",
            CheckStatus::Ok,
            "not used; --kubernetes turns it on",
        )),
        Some(kubernetes) => {
            checks.extend(kubelet::checks(&kubernetes.kubelet_root));
            checks.extend(runtimes::kubelets(&config.root, &kubernetes.kubelet_root));
            checks.extend(cluster(kubernetes).await);
        }
    }
    checks
}

/// A directory that exists and can be written, or can be made.
fn writable(name: &'static str, path: &Path) -> Check {
    let shown = path.display();
    let (existing, found) = match first_existing(path) {
        Ok(Some(existing)) => existing,
        Ok(None) => {
            return Check::new(name, CheckStatus::Failed, format!("{shown} cannot be made"));
        }
        Err(error) => return Check::new(name, CheckStatus::Failed, format!("{shown}: {error}")),
    };
    if !found.is_dir() {
        return Check::new(
            name,
            CheckStatus::Failed,
            format!("{} is not a directory", existing.display()),
        );
    }
    match rustix::fs::access(existing, rustix::fs::Access::WRITE_OK) {
        Ok(()) if existing == path => {
            Check::new(name, CheckStatus::Ok, format!("{shown} can be written"))
        }
        Ok(()) => Check::new(
            name,
            CheckStatus::Ok,
            format!("{shown} is made when the daemon starts"),
        ),
        Err(error) => Check::new(
            name,
            CheckStatus::Failed,
            format!("{} cannot be written: {error}", existing.display()),
        ),
    }
}

/// The path, or the first of the directories above it that is there.
fn first_existing(path: &Path) -> std::io::Result<Option<(&Path, Metadata)>> {
    for ancestor in path.ancestors() {
        if let Some(found) = file::metadata(ancestor)? {
            return Ok(Some((ancestor, found)));
        }
    }
    Ok(None)
}

/// Checks whether runtimes look in the directory that the daemon writes, according to the daemon's own config.
fn spec_directories(paths: &Paths) -> Check {
    let (cdi, read) = (&paths.cdi, &paths.cdi_spec_dirs);
    let listed = read
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(", ");
    match read.iter().any(|path| is_same(path, cdi)) {
        true => Check::new(
            "CDI search path",
            CheckStatus::Ok,
            format!("{} is in {listed}", cdi.display()),
        ),
        false => Check::new(
            "CDI search path",
            CheckStatus::Failed,
            format!(
                "runtimes look in {listed}, and not in {}: set cdiDir or cdiSpecDirs",
                cdi.display()
            ),
        ),
    }
}

/// Returns whether two paths are the same directory: `/var/run` is a link to `/run`.
fn is_same(a: &Path, b: &Path) -> bool {
    real(a) == real(b)
}

fn real(path: &Path) -> PathBuf {
    // no error: a path that cannot be followed is compared as it is
    let existing = first_existing(path)
        .ok()
        .flatten()
        .map_or(path, |(existing, _)| existing);
    let rest = path.strip_prefix(existing).unwrap_or(Path::new(""));
    // no error: the same
    existing
        .canonicalize()
        .unwrap_or_else(|_| existing.to_owned())
        .join(rest)
}

fn state_directory(paths: &Paths, root: &Path) -> Check {
    const NAME: &str = "state directory";
    match app::directories::faults(paths) {
        Ok(faults) if faults.is_empty() => {
            writable(NAME, paths.checkpoint.parent().unwrap_or(root))
        }
        Ok(faults) => {
            let finding = format!(
                "other users can change files of the daemon: {}",
                faults.join("; ")
            );
            Check::new(NAME, CheckStatus::Failed, finding)
        }
        Err(error) => Check::new(NAME, CheckStatus::Failed, chain(error.as_ref())),
    }
}

/// The writer of a driver's file and grant decides what the driver may do.
fn drivers_directory(path: &Path) -> Check {
    use std::os::unix::fs::MetadataExt;
    const NAME: &str = "drivers directory";
    let shown = path.display();
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Check::new(
            NAME,
            CheckStatus::Ok,
            format!("{shown} is made when the daemon starts"),
        ),
        Err(error) => Check::new(NAME, CheckStatus::Failed, format!("{shown}: {error}")),
        Ok(found) if !found.is_dir() => Check::new(
            NAME,
            CheckStatus::Failed,
            format!("{shown} is not a directory"),
        ),
        Ok(found) if found.mode() & 0o022 != 0 => {
            let mode = found.mode() & 0o7777;
            Check::new(
                NAME,
                CheckStatus::Failed,
                format!("{shown} has mode {mode:o}: others may add drivers; use chmod go-w"),
            )
        }
        Ok(found) if found.uid() != rustix::process::geteuid().as_raw() && found.uid() != 0 => {
            Check::new(
                NAME,
                CheckStatus::Warning,
                format!("{shown} belongs to user {}", found.uid()),
            )
        }
        Ok(_) => Check::new(NAME, CheckStatus::Ok, shown.to_string()),
    }
}

fn driver_image(image: &DriverImage) -> Check {
    const NAME: &str = "driver image";
    match image.find() {
        Ok(file) => Check::new(
            NAME,
            CheckStatus::Ok,
            format!("{}: {}", image.name, file.display()),
        ),
        Err(error) => Check::new(NAME, CheckStatus::Failed, error.to_string()),
    }
}

fn hardware(hardware: &Hardware) -> Check {
    let sys = hardware.sys();
    match hardware.open_sys() {
        Ok(_) => Check::new(
            "/sys",
            CheckStatus::Ok,
            format!("{} can be read", sys.display()),
        ),
        Err(error) => Check::new(
            "/sys",
            CheckStatus::Failed,
            format!("{}: {error}", sys.display()),
        ),
    }
}

async fn cluster(kubernetes: &KubernetesConfig) -> Vec<Check> {
    let client = match app::cluster_client(kubernetes).await {
        Ok(client) => client,
        Err(error) => {
            return vec![Check::new(
                "API server",
                CheckStatus::Failed,
                chain(error.as_ref()),
            )];
        }
    };
    let server = match preflight::server(&client).await {
        Ok(server) => server,
        Err(error) => {
            return vec![Check::new(
                "API server",
                CheckStatus::Failed,
                error.to_string(),
            )];
        }
    };
    let dra = match &server.dra {
        Ok(version) => {
            let (server, version) = (&server.version, version.as_str());
            Check::new(
                "API server",
                CheckStatus::Ok,
                format!("{server} serves resource.k8s.io/{version}"),
            )
        }
        Err(error) => Check::new(
            "API server",
            CheckStatus::Failed,
            format!("{}: {error}", server.version),
        ),
    };
    let mut checks = vec![dra];
    checks.extend(node(&client, kubernetes).await);
    checks.push(extended_resources(&client, kubernetes).await);
    checks.push(rights(&client).await);
    checks
}

async fn node(client: &KubeClient, kubernetes: &KubernetesConfig) -> Vec<Check> {
    const NAME: &str = "Node object";
    let name = &kubernetes.node_name;
    match preflight::node(client, name).await {
        Err(error) => vec![not_seen(NAME, &error)],
        Ok(None) => {
            vec![Check::new(
                NAME,
                CheckStatus::Failed,
                format!("there is no node {name}: is --node-name right?"),
            )]
        }
        Ok(Some(info)) => {
            let kubelet = format!("{name}, kubelet {}", info.kubelet_version);
            let runtime = runtimes::of_node(&info.container_runtime_version);
            let mut checks = vec![Check::new(NAME, CheckStatus::Ok, kubelet), runtime];
            checks.extend(runtimes::talos(&info.os_image));
            checks
        }
    }
}

const RIGHTS: &str = "rights";
async fn extended_resources(client: &KubeClient, kubernetes: &KubernetesConfig) -> Check {
    const NAME: &str = "extended resources";
    let (node, setting) = (&kubernetes.node_name, kubernetes.extended_resources);
    match extended_resources::decided(client, node, setting).await {
        Some(Decision { mechanism, reason }) => Check::new(
            NAME,
            CheckStatus::Ok,
            format!("offered by {mechanism}: {reason}"),
        ),
        None => {
            let unread = "the versions of API server and kubelet cannot be read: none are offered on a new node";
            Check::new(NAME, CheckStatus::Unknown, unread)
        }
    }
}

async fn rights(client: &KubeClient) -> Check {
    preflight::missing_rights(client).await.map_or_else(
        |error| not_seen(RIGHTS, &error),
        |missing| missing_rights(&missing),
    )
}

fn missing_rights(missing: &[MissingRight]) -> Check {
    if missing.is_empty() {
        return Check::new(RIGHTS, CheckStatus::Ok, "the account has all that it needs");
    }
    let names: Vec<_> = missing.iter().map(|right| right.name.as_str()).collect();
    let finding = format!("the account lacks: {}", names.join(", "));
    match missing.iter().all(|right| right.is_optional) {
        true => Check::new(
            RIGHTS,
            CheckStatus::Warning,
            format!("{finding}; the daemon works without"),
        ),
        false => Check::new(RIGHTS, CheckStatus::Failed, finding),
    }
}

fn not_seen(name: &'static str, error: &ApiError) -> Check {
    Check::new(name, CheckStatus::Unknown, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_required_missing_rights_fail_check() {
        let right = |name: &str, is_optional| MissingRight {
            name: name.to_owned(),
            is_optional,
        };
        let (pods, nodes) = (right("list pods", true), right("get nodes", false));
        assert_eq!(missing_rights(&[]).verdict, CheckStatus::Ok);
        let optional = missing_rights(std::slice::from_ref(&pods));
        assert_eq!(optional.verdict, CheckStatus::Warning);
        assert!(
            optional.finding.contains("lacks: list pods;"),
            "{optional:?}"
        );
        let both = missing_rights(&[pods, nodes]);
        assert_eq!(
            (both.verdict, both.finding.as_str()),
            (
                CheckStatus::Failed,
                "the account lacks: list pods, get nodes"
            )
        );
    }

    #[test]
    fn directory_is_writable_or_created() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(writable("x", dir.path()).verdict, CheckStatus::Ok);
        let below = writable("x", &dir.path().join("a/b"));
        assert!(
            below.verdict == CheckStatus::Ok && below.finding.contains("is made"),
            "{below:?}"
        );
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(writable("x", &file.join("a")).verdict, CheckStatus::Failed);
    }

    #[test]
    fn writable_drivers_directory_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let set = |mode| {
            std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap()
        };
        set(0o755);
        assert_eq!(drivers_directory(dir.path()).verdict, CheckStatus::Ok);
        set(0o775);
        let open = drivers_directory(dir.path());
        assert!(
            open.verdict == CheckStatus::Failed && open.finding.contains("775"),
            "{open:?}"
        );
        assert_eq!(
            drivers_directory(&dir.path().join("none")).verdict,
            CheckStatus::Ok
        );
    }

    #[test]
    fn a_driver_image_has_one_driver() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().to_owned();
        let image = DriverImage {
            name: "gpu".to_owned(),
            side_files: directory.clone(),
            directory,
        };
        let empty = driver_image(&image);
        assert!(
            empty.verdict == CheckStatus::Failed && empty.finding.contains("driver image gpu"),
            "{empty:?}"
        );
        std::fs::write(dir.path().join("driver.wasm"), "").unwrap();
        let one = driver_image(&image);
        assert!(
            one.verdict == CheckStatus::Ok && one.finding.ends_with("/driver.wasm"),
            "{one:?}"
        );
    }

    #[test]
    fn directory_link_equals_its_target() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        std::os::unix::fs::symlink("run", dir.path().join("var-run")).unwrap();
        assert!(is_same(
            &dir.path().join("run/cdi"),
            &dir.path().join("var-run/cdi")
        ));
        assert!(!is_same(
            &dir.path().join("run/cdi"),
            &dir.path().join("etc/cdi")
        ));
    }
}
