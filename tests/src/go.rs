//! Programs of a Go module, built with its own modules and Go's own cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::machine::program;

/// Arguments of the linker for programs of `tests/interop/kubernetes`, which say their version: that of its `go.mod`.
pub const KUBERNETES_VERSION_FLAGS: &str = "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.2 \
    -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36";

/// A Go module with programs in `cmd`.
#[derive(Debug)]
pub struct Module<'a> {
    /// Directory of `go.mod`.
    pub sources: PathBuf,
    /// Directory of the built programs.
    pub output: PathBuf,
    /// Time for fetching the modules that it requires.
    pub fetch_seconds: u32,
    /// Time for compiling a program on a slow machine.
    pub build_seconds: u32,
    /// Arguments of the linker.
    pub linker_flags: &'a str,
    /// The file of requirements in the directory, where it is not `go.mod`.
    pub requirements: Option<&'a str>,
}

impl Module<'_> {
    /// A program, built. Without Go or its modules there is none; a program that does not compile is a failure.
    pub fn program(&self, name: &str) -> Result<PathBuf, String> {
        let go = compiler().ok_or("Go is not installed")?;
        let package = format!("./cmd/{name}");
        let requirements = self.requirements.map(|file| format!("-modfile={file}"));
        let requirements = requirements.iter().map(String::as_str);
        let mut list = vec!["list"];
        list.extend(requirements.clone());
        list.extend(["-deps", "-f", "{{.Name}}", &package]);
        self.bounded(self.fetch_seconds, &go, &list)
            .map_err(|why| format!("Go modules cannot be fetched: {why}"))?;
        let built = self.output.join(name);
        let output = built
            .to_str()
            .expect("the target directory has a name in UTF-8");
        let mut build = vec!["build"];
        build.extend(requirements);
        build.extend([
            "-buildvcs=false",
            "-ldflags",
            self.linker_flags,
            "-o",
            output,
            &package,
        ]);
        let built_in_time = self.bounded(self.build_seconds, &go, &build);
        built_in_time.unwrap_or_else(|why| panic!("go build {package}: {why}"));
        Ok(built)
    }

    fn bounded(&self, seconds: u32, go: &Path, args: &[&str]) -> Result<(), String> {
        let mut command = Command::new("timeout");
        command
            .arg(seconds.to_string())
            .arg(go)
            .args(args)
            .current_dir(&self.sources)
            .stdout(Stdio::null());
        let output = command.stdin(Stdio::null()).stderr(Stdio::piped()).output();
        let output = output.map_err(|error| format!("timeout: {error}"))?;
        match output.status.code() {
            Some(0) => Ok(()),
            Some(124) => Err(format!("it took more than {seconds} s")),
            _ => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

/// The `go` command, if it is installed.
pub fn compiler() -> Option<PathBuf> {
    program("go").or_else(usual_go)
}

/// Returns the path at which Go's own installer puts it, which not every PATH has.
fn usual_go() -> Option<PathBuf> {
    Some(PathBuf::from("/usr/local/go/bin/go")).filter(|go| go.is_file())
}
