//! containerd, by itself and as a part of Kubernetes distributions: by its config files.

use std::io;
use std::path::{Path, PathBuf};

use globset::Glob;
use toml::Value;

use super::{
    CdiSettings, Check, CheckStatus, below, below_with, file, files_of, first_of, is_same, judged,
    merged, paths, read_all, unseen,
};

/// The section about containers: of 2.x and of 1.x.
const SECTIONS: [&str; 2] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"];
/// The names by which a config turns off what serves a kubelet.
const PLUGINS: [&str; 3] = ["cri", SECTIONS[0], SECTIONS[1]];
/// Files that a config imports, of which more are not read.
const IMPORTS_MAX: usize = 64;
const TALOS: &str = "Talos";

/// A containerd, with its paths below the root of a node.
struct Distribution {
    name: &'static str,
    config: &'static str,
    /// A directory whose TOML files are read as well.
    drop_ins: Option<&'static str>,
    /// Paths of which each shows that it is installed.
    signs: &'static [&'static str],
    /// The files that an operator changes.
    edit: &'static str,
    /// The kubelet's directory, where that is not the usual one.
    kubelet: Option<&'static str>,
}

const DISTRIBUTIONS: [Distribution; 6] = [
    Distribution {
        name: "containerd",
        config: "etc/containerd/config.toml",
        drop_ins: None,
        signs: &[
            "run/containerd/containerd.sock",
            "usr/bin/containerd",
            "usr/local/bin/containerd",
        ],
        edit: "/etc/containerd/config.toml",
        kubelet: None,
    },
    Distribution {
        name: "k3s",
        config: "var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        drop_ins: None,
        signs: &["var/lib/rancher/k3s", "usr/local/bin/k3s", "usr/bin/k3s"],
        edit: "config-v3.toml.tmpl (config.toml.tmpl before containerd 2) in /var/lib/rancher/k3s/agent/etc/containerd",
        kubelet: None,
    },
    Distribution {
        name: "RKE2",
        config: "var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        drop_ins: None,
        signs: &["var/lib/rancher/rke2", "usr/local/bin/rke2", "usr/bin/rke2"],
        edit: "config-v3.toml.tmpl (config.toml.tmpl before containerd 2) in /var/lib/rancher/rke2/agent/etc/containerd",
        kubelet: None,
    },
    Distribution {
        name: "k0s",
        config: "etc/k0s/containerd.toml",
        drop_ins: None,
        signs: &[
            "run/k0s/containerd.sock",
            "var/lib/k0s",
            "usr/local/bin/k0s",
            "usr/bin/k0s",
        ],
        edit: "a file of /etc/k0s/containerd.d",
        kubelet: Some("var/lib/k0s/kubelet"),
    },
    Distribution {
        name: "microk8s",
        config: "var/snap/microk8s/current/args/containerd.toml",
        drop_ins: None,
        signs: &["var/snap/microk8s", "snap/microk8s"],
        edit: "/var/snap/microk8s/current/args/containerd-template.toml",
        kubelet: Some("var/snap/microk8s/common/var/lib/kubelet"),
    },
    Distribution {
        name: TALOS,
        config: "etc/cri/containerd.toml",
        drop_ins: Some("etc/cri/conf.d"),
        signs: &["etc/cri/conf.d"],
        edit: "20-customization.part of the machine config",
        kubelet: None,
    },
];

/// Checks those that are seen below a root.
pub(super) fn checks(root: &Path, cdi: &Path) -> Vec<Check> {
    DISTRIBUTIONS
        .iter()
        .filter_map(|distribution| distribution.check(root, cdi).unwrap_or_else(Some))
        .collect()
}

/// Checks whether the daemon uses the directory of a kubelet that has one of its own.
pub(in super::super) fn kubelets(root: &Path, used: &Path) -> Vec<Check> {
    DISTRIBUTIONS
        .iter()
        .filter_map(|distribution| distribution.kubelet(root, used))
        .collect()
}

/// Remarks that the system of a node is one whose config is not seen.
pub(in super::super) fn talos(os_image: &str) -> Option<Check> {
    os_image.starts_with(TALOS).then(|| {
        let finding = format!(
            "{os_image}: containerd's config comes from the machine config, which is not seen from here; cdi_spec_dirs in it has to have the daemon's directory"
        );
        Check::new(TALOS, CheckStatus::Unknown, finding)
    })
}

impl Distribution {
    /// Returns a finding also as an error; `None` if it is not installed.
    fn check(&self, root: &Path, cdi: &Path) -> Result<Option<Check>, Check> {
        let (name, main) = (self.name, root.join(self.config));
        let mut files = vec![main.clone()];
        files.extend(imports(&main, root).map_err(|error| unseen(name, &main, &error))?);
        if let Some(drop_ins) = self.drop_ins {
            files.extend(below_with(name, &root.join(drop_ins), "toml")?);
        }
        let configs = read_all(name, files)?;
        if configs.is_empty() {
            return self.without_config(root);
        }
        let files = files_of(&configs);
        if configs
            .iter()
            .any(|(_, config)| is_without_kubernetes(config))
        {
            let finding = format!(
                "serves no kubelet by {files}; whether Docker or nerdctl, which may use it, read CDI files is in their own configs"
            );
            return Ok(Some(Check::new(name, CheckStatus::Unknown, finding)));
        }
        let settings = merged(&configs, settings);
        Ok(Some(judged(name, &files, self.edit, &settings, root, cdi)))
    }

    fn without_config(&self, root: &Path) -> Result<Option<Check>, Check> {
        let signs = self.signs.iter().map(|sign| root.join(sign));
        Ok(first_of(self.name, signs)?.map(|sign| {
            let finding = format!(
                "{} is there, and no config in {}: by default CDI is on from containerd 2.0 on; set enable_cdi = true in {} for older ones",
                sign.display(),
                root.join(self.config).display(),
                self.edit
            );
            Check::new(self.name, CheckStatus::Unknown, finding)
        }))
    }

    fn kubelet(&self, root: &Path, used: &Path) -> Option<Check> {
        const NAME: &str = "kubelet root";
        let own = root.join(self.kubelet?);
        let (distribution, shown) = (self.name, own.display());
        match file::metadata(&own) {
            Ok(None) => None,
            Err(error) => Some(unseen(NAME, &own, &error)),
            Ok(Some(_)) if is_same(&own, used) => Some(Check::new(
                NAME,
                CheckStatus::Ok,
                format!("{shown} is that of {distribution}"),
            )),
            Ok(Some(_)) => {
                let finding = format!(
                    "{distribution} has its kubelet in {shown}, and the daemon looks in {}: set --kubelet-root {shown}",
                    used.display()
                );
                Some(Check::new(NAME, CheckStatus::Warning, finding))
            }
        }
    }
}

fn is_without_kubernetes(config: &Value) -> bool {
    config
        .get("disabled_plugins")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .any(|plugin| PLUGINS.contains(&plugin))
}

fn settings(config: &Value) -> CdiSettings {
    let sections = SECTIONS
        .iter()
        .filter_map(|plugin| config.get("plugins")?.get(plugin));
    let mut settings = CdiSettings::default();
    for section in sections {
        settings.enabled = settings
            .enabled
            .or(section.get("enable_cdi").and_then(Value::as_bool));
        settings.directories = settings
            .directories
            .or_else(|| paths(section.get("cdi_spec_dirs")?));
    }
    // Releases from 2.0 on read configs of older versions as well.
    let version = config
        .get("version")
        .and_then(Value::as_integer)
        .unwrap_or(1);
    settings.depends = version < 3;
    settings
}

/// The files that a config of containerd imports: paths, with wildcards in the last part, relative to the config's directory.
fn imports(config: &Path, root: &Path) -> io::Result<Vec<PathBuf>> {
    let text = match std::fs::read_to_string(config) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text?,
    };
    // no error: the config is read again with what it imports, and one that is not TOML is a finding then
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
        // no error: containerd itself refuses a pattern that is none, and does not start
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A root with the files, and its directory of CDI files.
    fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let cdi = root.path().join("var/run/cdi");
        (root, cdi)
    }

    fn found(files: &[(&str, &str)]) -> Vec<(&'static str, CheckStatus)> {
        let (root, cdi) = root(files);
        let checks = checks(root.path(), &cdi);
        checks
            .into_iter()
            .map(|check| (check.name, check.verdict))
            .collect()
    }

    #[test]
    fn every_distribution_has_its_config() {
        let new = "version = 3\n";
        let off = "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = false\n";
        for distribution in &DISTRIBUTIONS {
            let (name, config) = (distribution.name, distribution.config);
            for (text, verdict) in [
                (new, CheckStatus::Ok),
                (off, CheckStatus::Failed),
                ("version = ", CheckStatus::Unknown),
            ] {
                assert_eq!(found(&[(config, text)]), [(name, verdict)], "{text}");
            }
            let (root, cdi) = root(&[]);
            std::fs::create_dir_all(root.path().join(config)).unwrap();
            let unread = checks(root.path(), &cdi).remove(0);
            assert!(
                unread.verdict == CheckStatus::Unknown && unread.finding.contains(config),
                "{unread:?}"
            );
        }
        assert!(found(&[]).is_empty());
    }

    #[test]
    fn distribution_without_config_is_unknown() {
        for distribution in &DISTRIBUTIONS {
            for sign in distribution.signs {
                let file = format!("{sign}/file");
                let unknown = (distribution.name, CheckStatus::Unknown);
                assert_eq!(found(&[(file.as_str(), "")]), [unknown], "{sign}");
            }
        }
    }

    #[test]
    fn talos_config_is_of_several_files() {
        let off = "[plugins.'io.containerd.cri.v1.runtime']\ncdi_spec_dirs = ['/var/cdi']\n";
        let files = [
            ("etc/cri/containerd.toml", "version = 3\n"),
            ("etc/cri/conf.d/cri.toml", off),
        ];
        assert_eq!(found(&files), [(TALOS, CheckStatus::Failed)]);
        assert_eq!(
            talos("Talos (v1.14.0)").map(|check| check.verdict),
            Some(CheckStatus::Unknown)
        );
        assert_eq!(talos("Debian GNU/Linux 13 (trixie)"), None);
    }

    #[test]
    fn disabled_kubernetes_plugin_is_unknown() {
        let docker = "disabled_plugins = ['cri']\n";
        assert_eq!(
            found(&[("etc/containerd/config.toml", docker)]),
            [("containerd", CheckStatus::Unknown)]
        );
    }

    #[test]
    fn file_without_version_changes_no_release() {
        let files = [
            (
                "etc/containerd/config.toml",
                "version = 3\nimports = ['conf.d/*.toml']\n",
            ),
            ("etc/containerd/conf.d/a.toml", "[debug]\n"),
        ];
        assert_eq!(found(&files), [("containerd", CheckStatus::Ok)]);
    }

    #[test]
    fn daemon_uses_the_kubelets_directory() {
        for path in [
            "var/lib/k0s/kubelet",
            "var/snap/microk8s/common/var/lib/kubelet",
        ] {
            let file = format!("{path}/config.yaml");
            let (root, _) = root(&[(file.as_str(), "")]);
            let own = root.path().join(path);
            let verdict = |used: &Path| kubelets(root.path(), used)[0].verdict;
            assert_eq!(verdict(&own), CheckStatus::Ok);
            assert_eq!(
                verdict(&root.path().join("var/lib/kubelet")),
                CheckStatus::Warning
            );
        }
        let (root, cdi) = root(&[]);
        assert!(kubelets(root.path(), &cdi).is_empty());
    }
}
