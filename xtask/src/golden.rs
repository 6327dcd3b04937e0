//! Builds the golden driver in every language whose tools are installed: `target/golden/LANGUAGE.wasm`.
//!
//! A file is built again only if its sources, the contract or its tools changed: some builds take half a minute.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::drivers::place;
use crate::machine::{self, Finding, Tool};
use crate::shell;
use crate::workspace::Workspace;

/// The driver's directory among the examples, and its name.
const GOLDEN: &str = "golden";
const WORLD: &str = "driver";

/// A language with a toolchain of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Language {
    C,
    Python,
    JavaScript,
}

pub(crate) const LANGUAGES: [Language; 3] = [Language::C, Language::Python, Language::JavaScript];

impl Language {
    /// Name of its directory and of its file.
    fn name(self) -> &'static str {
        match self {
            Self::C => "c",
            Self::Python => "python",
            Self::JavaScript => "javascript",
        }
    }

    /// Human-readable name.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::C => "C",
            Self::Python => "Python",
            Self::JavaScript => "JavaScript",
        }
    }

    fn tool(self, workspace: &Workspace) -> Result<Tool, String> {
        match self {
            Self::C => machine::clang_for_wasm(),
            Self::Python => machine::componentize_py(&workspace.target.join("python")),
            Self::JavaScript => machine::componentize_js(&self.workplace(workspace)),
        }
    }

    /// Directory of the bindings for C. For JavaScript that of npm's modules: Node looks for them beside the sources, which are
    /// copied there.
    fn workplace(self, workspace: &Workspace) -> PathBuf {
        workspace.target.join("golden-tools").join(self.name())
    }

    /// Returns what is generated from the contract, which the tools of the other languages read themselves.
    fn bindings(self, workspace: &Workspace) -> Result<Vec<(String, Vec<u8>)>> {
        match self {
            Self::C => nodedock_bindings::generate(
                nodedock_bindings::Language::C,
                &workspace.root.join("wit"),
                WORLD,
            ),
            Self::Python | Self::JavaScript => Ok(Vec::new()),
        }
    }

    fn sources(self, workspace: &Workspace) -> PathBuf {
        workspace
            .root
            .join("example-drivers")
            .join(GOLDEN)
            .join(self.name())
    }
}

/// Returns whether each language's tools are installed.
pub(crate) fn findings(workspace: &Workspace) -> Vec<(String, Finding)> {
    LANGUAGES
        .iter()
        .map(|language| {
            (
                format!("the golden driver in {}", language.title()),
                match language.tool(workspace) {
                    Ok(_) => Finding::Present,
                    Err(why) => Finding::Missing(why),
                },
            )
        })
        .collect()
}

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    crate::drivers::build(workspace)?;
    build(workspace)?;
    for (what, finding) in findings(workspace) {
        if let Finding::Missing(why) = finding {
            eprintln!("skipped: {what}: {why}");
        }
    }
    Ok(())
}

/// Builds each language whose tools are installed. Removes outdated files of the others.
pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    let directory = workspace.target.join(GOLDEN);
    fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    for (form, name) in [("", "rust"), ("wasip2", "rust-wasip2")] {
        let built = workspace
            .drivers_dir()
            .join(form)
            .join(format!("{GOLDEN}.wasm"));
        place(&built, &directory.join(format!("{name}.wasm")))?;
    }
    LANGUAGES
        .iter()
        .try_for_each(|language| bring_up_to_date(workspace, *language, &directory))
}

fn bring_up_to_date(workspace: &Workspace, language: Language, directory: &Path) -> Result<()> {
    let (file, stamp) = (
        directory.join(language.name()),
        directory.join(format!("{}.stamp", language.name())),
    );
    let file = file.with_extension("wasm");
    let tool = language.tool(workspace);
    let inputs = inputs(workspace, language, tool.as_ref().ok())?;
    if file.is_file()
        && fs::read(&stamp).is_ok_and(|before| is_same(&before, &inputs, tool.is_ok()))
    {
        return Ok(());
    }
    remove(&file)?;
    remove(&stamp)?;
    let Ok(tool) = tool else { return Ok(()) };
    compile(workspace, language, &tool, &file)?;
    let size = fs::metadata(&file)
        .with_context(|| format!("{} was not built", file.display()))?
        .len();
    eprintln!("{:>7} KiB  {}", size.div_ceil(1024), file.display());
    // Removes the tests' compile cache, which would keep entries of deleted files forever.
    let _ = fs::remove_dir_all(directory.join("cache"));
    fs::write(&stamp, inputs).with_context(|| format!("writing {}", stamp.display()))
}

/// Compares the inputs; without the tool, only the sources.
fn is_same(before: &[u8], now: &[u8], with_tool: bool) -> bool {
    if with_tool {
        before == now
    } else {
        without_tool(before) == without_tool(now)
    }
}

fn without_tool(stamp: &[u8]) -> Option<Vec<u8>> {
    stamp
        .iter()
        .position(|byte| *byte == b'\n')
        .map(|end| stamp[end..].to_vec())
}

/// Returns the tool in the first line, then all sources, and what another version of a generator may generate from them.
fn inputs(workspace: &Workspace, language: Language, tool: Option<&Tool>) -> Result<Vec<u8>> {
    let mut inputs = tool
        .map_or("", |tool| tool.version.as_str())
        .replace('\n', " ")
        .into_bytes();
    let mut paths = Vec::new();
    collect(&workspace.root.join("wit"), &mut paths)?;
    collect(&language.sources(workspace), &mut paths)?;
    for path in paths {
        let bytes = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        inputs.extend(format!("\n{} {}\n", path.display(), bytes.len()).into_bytes());
        inputs.extend(bytes);
    }
    for (path, bytes) in language.bindings(workspace)? {
        inputs.extend(format!("\n{path} {}\n", bytes.len()).into_bytes());
        inputs.extend(bytes);
    }
    Ok(inputs)
}

/// Returns the files below a directory in the order of their names, without artifacts of tools.
fn collect(directory: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let entries: Vec<_> = fs::read_dir(directory)
        .and_then(Iterator::collect)
        .with_context(|| format!("reading {}", directory.display()))?;
    let mut found: Vec<_> = entries
        .into_iter()
        .map(|entry: fs::DirEntry| entry.path())
        .collect();
    found.sort();
    for path in found {
        let left = [
            "node_modules",
            "__pycache__",
            "package-lock.json",
            "README.md",
        ];
        if left.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            collect(&path, paths)?;
        } else {
            paths.push(path);
        }
    }
    Ok(())
}

fn compile(workspace: &Workspace, language: Language, tool: &Tool, output: &Path) -> Result<()> {
    let (sources, wit) = (language.sources(workspace), workspace.root.join("wit"));
    let mut command = Command::new(&tool.program);
    match language {
        Language::C => {
            command.args(["--target=wasm32-wasi", "-Os", "-Wall", "-nostartfiles"]);
            command.args(["-Wl,--no-entry", "-Wl,--strip-all", "golden.c"]);
            let workplace = language.workplace(workspace);
            let bindings = workplace.join(nodedock_bindings::DIRECTORY);
            fs::create_dir_all(&bindings)
                .with_context(|| format!("creating {}", bindings.display()))?;
            for (name, bytes) in language.bindings(workspace)? {
                let file = bindings.join(name);
                fs::write(&file, bytes).with_context(|| format!("writing {}", file.display()))?;
                if file.extension().is_some_and(|extension| extension != "h") {
                    command.arg(file);
                }
            }
            command.arg("-I").arg(workplace).arg("-o").arg(output);
            command.current_dir(&sources);
        }
        Language::Python => {
            command.arg("-d").arg(wit).args([
                "-w",
                WORLD,
                "componentize",
                "--stub-wasi",
                "golden",
                "-o",
            ]);
            command.arg(output).current_dir(&sources);
        }
        Language::JavaScript => {
            let workplace = language.workplace(workspace);
            for file in ["build.js", "golden.js", "package.json"] {
                place(&sources.join(file), &workplace.join(file))?;
            }
            command
                .arg("build.js")
                .arg(wit)
                .arg(output)
                .current_dir(workplace);
        }
    }
    shell::run(&mut command)
}

fn remove(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("removing {}", file.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(root: &Path) -> Workspace {
        let sources = root.join("example-drivers/golden/python");
        fs::create_dir_all(sources.join("__pycache__")).unwrap();
        fs::create_dir_all(root.join("wit")).unwrap();
        fs::write(root.join("wit/driver.wit"), "package a:b;").unwrap();
        fs::write(sources.join("golden.py"), "pass").unwrap();
        fs::write(sources.join("__pycache__/golden.pyc"), "junk").unwrap();
        Workspace {
            root: root.to_owned(),
            target: root.join("target"),
            drivers: Vec::new(),
            suites: Default::default(),
        }
    }

    #[test]
    fn stamp_covers_tool_contract_and_sources() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = workspace(dir.path());
        let tool = |version: &str| Tool {
            program: "x".into(),
            version: version.into(),
        };
        let of = |tool: Option<&Tool>| inputs(&workspace, Language::Python, tool).unwrap();
        let first = of(Some(&tool("1.0\nof today")));
        let text = String::from_utf8(first.clone()).unwrap();
        assert!(
            text.starts_with("1.0 of today\n") && text.contains("package a:b;"),
            "{text}"
        );
        assert!(
            text.contains("golden.py 4\npass") && !text.contains("junk"),
            "{text}"
        );
        assert!(is_same(&first, &of(Some(&tool("1.0\nof today"))), true));
        assert!(!is_same(&first, &of(Some(&tool("1.1"))), true));
        assert!(
            is_same(&first, &of(None), false),
            "what was built stays good without the tool"
        );

        fs::write(workspace.root.join("wit/driver.wit"), "package a:c;").unwrap();
        assert!(!is_same(&first, &of(Some(&tool("1.0\nof today"))), true));
        assert!(!is_same(&first, &of(None), false));
    }

    #[test]
    fn outdated_output_without_tools_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let workspace = workspace(dir.path());
        let directory = dir.path().join("target/golden");
        fs::create_dir_all(&directory).unwrap();
        let file = directory.join("javascript.wasm");
        let sources = dir.path().join("example-drivers/golden/javascript");
        fs::create_dir_all(&sources).unwrap();
        fs::write(&file, "old").unwrap();
        fs::write(directory.join("javascript.stamp"), "1.0\nother sources").unwrap();
        // npm has not run in this target directory.
        bring_up_to_date(&workspace, Language::JavaScript, &directory).unwrap();
        assert!(!file.exists());
        fs::write(&file, "built").unwrap();
        let stamp = inputs(&workspace, Language::JavaScript, None).unwrap();
        fs::write(
            directory.join("javascript.stamp"),
            [b"node 1".as_slice(), &stamp].concat(),
        )
        .unwrap();
        bring_up_to_date(&workspace, Language::JavaScript, &directory).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"built");
    }
}
