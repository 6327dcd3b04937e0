//! Checks whether container runtimes read CDI files from the daemon's directory, by their config files and by the kubelet's report of them.

use std::io;
use std::path::{Path, PathBuf};

use globset::Glob;
use semver::Version;
use toml::Value;

use super::{Check, CheckStatus, is_same};
use nodedock_base::error::chain;

/// Directories in which runtimes look unless their config says otherwise.
const USUAL: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// containerd's section about containers: of 2.x and of 1.x.
const CONTAINERD: [&str; 2] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"];
/// Files that containerd's config imports, of which more are not read.
const IMPORTS_MAX: usize = 64;

/// Checks the configs that can be read below a root.
pub(super) fn checks(root: &Path, cdi: &Path) -> Vec<Check> {
    let containerd = root.join("etc/containerd/config.toml");
    let imported = imports(&containerd, root);
    let crio = root.join("etc/crio/crio.conf");
    let of_crio_directory = below(&root.join("etc/crio/crio.conf.d"));
    let check = |name, main: PathBuf, others: io::Result<Vec<PathBuf>>, read| match others {
        Ok(others) => check(name, std::iter::once(main).chain(others), root, cdi, read),
        Err(error) => Some(Check::new(
            name,
            CheckStatus::Unknown,
            format!("{}: {error}", main.display()),
        )),
    };
    let containerd = check(
        "containerd",
        containerd,
        imported,
        of_containerd as fn(&Value) -> Said,
    );
    [containerd, check("CRI-O", crio, of_crio_directory, of_crio)]
        .into_iter()
        .flatten()
        .collect()
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

/// The files that a config of containerd imports: paths, with wildcards in the last part, relative to the config's directory.
fn imports(config: &Path, root: &Path) -> io::Result<Vec<PathBuf>> {
    let text = match std::fs::read_to_string(config) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    let table = text.parse::<toml::Table>().unwrap_or_default();
    let listed = table
        .get("imports")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let mut files = Vec::new();
    for pattern in listed.filter_map(Value::as_str) {
        let path = Path::new(pattern);
        let path = match path.strip_prefix("/") {
            Ok(of_node) => root.join(of_node),
            Err(_) => config.with_file_name("").join(path),
        };
        let glob = path
            .file_name()
            .and_then(|name| Some(Glob::new(name.to_str()?).ok()?.compile_matcher()));
        files.extend(
            below(path.parent().unwrap_or(root))?
                .into_iter()
                .filter(move |file| {
                    glob.as_ref().is_some_and(|glob| {
                        file.file_name().is_some_and(|name| glob.is_match(name))
                    })
                }),
        );
    }
    files.truncate(IMPORTS_MAX);
    Ok(files)
}

/// The settings about CDI in a runtime's config. `None`: no such setting.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Said {
    enabled: Option<bool>,
    /// It is off in releases of the runtime from before this config's successor.
    depends: bool,
    directories: Option<Vec<PathBuf>>,
}

fn check(
    name: &'static str,
    files: impl IntoIterator<Item = PathBuf>,
    root: &Path,
    cdi: &Path,
    read: fn(&Value) -> Said,
) -> Option<Check> {
    let (mut said, mut seen) = (Said::default(), Vec::new());
    for file in files {
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Some(Check::new(
                    name,
                    CheckStatus::Unknown,
                    format!("{}: {error}", file.display()),
                ));
            }
        };
        let config = match text.parse::<toml::Table>() {
            Ok(config) => Value::Table(config),
            Err(error) => {
                let finding = format!("{} is not TOML: {}", file.display(), chain(&error));
                return Some(Check::new(name, CheckStatus::Unknown, finding));
            }
        };
        let here = read(&config);
        said = Said {
            enabled: here.enabled.or(said.enabled),
            depends: here.depends || said.depends,
            directories: here.directories.or(said.directories),
        };
        seen.push(file.display().to_string());
    }
    (!seen.is_empty()).then(|| judged(name, &seen.join(", "), &said, root, cdi))
}

fn judged(name: &'static str, files: &str, said: &Said, root: &Path, cdi: &Path) -> Check {
    if said.enabled == Some(false) {
        return Check::new(
            name,
            CheckStatus::Failed,
            format!("CDI is off in {files}: set enable_cdi = true"),
        );
    }
    // The paths are the node's, which is below the root.
    let directories: Vec<PathBuf> = said
        .directories
        .clone()
        .unwrap_or_else(|| USUAL.iter().map(PathBuf::from).collect());
    let shown = directories
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(", ");
    match directories
        .iter()
        .any(|path| is_same(&root.join(path.strip_prefix("/").unwrap_or(path)), cdi))
    {
        true if said.depends && said.enabled.is_none() => Check::new(
            name,
            CheckStatus::Warning,
            format!("CDI is off in releases before 2.0 unless enable_cdi = true is in {files}"),
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
                "reads CDI files in {shown} ({files}), and not in {}",
                cdi.display()
            ),
        ),
    }
}

fn of_containerd(config: &Value) -> Said {
    let sections = CONTAINERD
        .iter()
        .filter_map(|plugin| config.get("plugins")?.get(plugin));
    let mut said = Said::default();
    for section in sections {
        said.enabled = said
            .enabled
            .or(section.get("enable_cdi").and_then(Value::as_bool));
        said.directories = said
            .directories
            .or_else(|| paths(section.get("cdi_spec_dirs")?));
    }
    // Releases from 2.0 on read configs of older versions as well.
    let version = config
        .get("version")
        .and_then(Value::as_integer)
        .unwrap_or(1);
    said.depends = version < 3;
    said
}

fn of_crio(config: &Value) -> Said {
    let runtime = config.get("crio").and_then(|crio| crio.get("runtime"));
    Said {
        enabled: None,
        depends: false,
        directories: runtime.and_then(|runtime| paths(runtime.get("cdi_spec_dirs")?)),
    }
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

    fn found(name: &str, path: &str, text: &str) -> Option<Check> {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
        let checks = checks(root.path(), &root.path().join("var/run/cdi"));
        checks.into_iter().find(|check| check.name == name)
    }

    #[test]
    fn runtime_config_decides_cdi_verdict() {
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
            let check = found("containerd", file, &text).unwrap();
            assert_eq!(check.verdict, verdict, "{text}: {check:?}");
        }
        let crio = "[crio.runtime]\ncdi_spec_dirs = ['/opt/cdi']\n";
        assert_eq!(
            found("CRI-O", "etc/crio/crio.conf.d/10-cdi.conf", crio)
                .unwrap()
                .verdict,
            CheckStatus::Failed
        );
        assert_eq!(
            found("CRI-O", "etc/crio/crio.conf", "[crio]\n")
                .unwrap()
                .verdict,
            CheckStatus::Ok
        );
        assert_eq!(found("CRI-O", FILE, new), None, "no config, no finding");
    }

    #[test]
    fn imported_config_files_are_read() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("etc/containerd");
        std::fs::create_dir_all(directory.join("conf.d")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
        let verdict = || checks(root.path(), &root.path().join("var/run/cdi"))[0].verdict;
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
