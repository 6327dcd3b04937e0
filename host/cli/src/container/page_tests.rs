//! Blocks of `docs/containers.md` that other programs read: they parse, name devices that can exist, and have keys and commands that are known.

use std::collections::BTreeMap;

use clap::Parser;
use nodedockd::device_names;
use serde::Deserialize;
use serde_json::Value;

use crate::Cli;

const PAGE: &str = include_str!("../../../../docs/containers.md");

/// A block of code, with the heading before it.
struct Block {
    heading: String,
    language: String,
    text: String,
}

fn blocks() -> Vec<Block> {
    let (mut heading, mut blocks) = (String::new(), Vec::<Block>::new());
    let mut is_code = false;
    for line in PAGE.lines() {
        match (is_code, line.strip_prefix("```")) {
            (true, Some(_)) => is_code = false,
            (false, Some(language)) => {
                is_code = true;
                blocks.push(Block {
                    heading: heading.clone(),
                    language: language.to_owned(),
                    text: String::new(),
                });
            }
            (true, None) => {
                let block = blocks.last_mut().unwrap();
                block.text.push_str(line);
                block.text.push('\n');
            }
            (false, None) => {
                if let Some(text) = line.strip_prefix('#') {
                    heading = text.trim_start_matches('#').trim().to_owned();
                }
            }
        }
    }
    assert!(!is_code, "the last block has no end");
    blocks
}

/// The texts of the blocks of a language below a heading.
fn texts(heading: &str, language: &str) -> Vec<String> {
    let found: Vec<_> = blocks()
        .into_iter()
        .filter(|block| block.heading == heading && block.language == language)
        .map(|block| block.text)
        .collect();
    assert!(!found.is_empty(), "no {language} below {heading:?}");
    found
}

fn yaml<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn assert_device(name: &str) {
    if let Err(error) = device_names::parse(name) {
        panic!("{error:#}");
    }
}

/// Checks a line of a shell if it is a command of this program.
fn check_command(line: &str) -> bool {
    if !line.starts_with("nodedock ") {
        return false;
    }
    if let Err(error) = Cli::try_parse_from(line.split_whitespace()) {
        panic!("{line}: {error}");
    }
    true
}

#[test]
fn config_blocks_parse() {
    let mut parsed = 0;
    for block in blocks() {
        let error = match block.language.as_str() {
            "json" => serde_json::from_str::<Value>(&block.text)
                .err()
                .map(|e| e.to_string()),
            "toml" => toml::from_str::<toml::Table>(&block.text)
                .err()
                .map(|e| e.to_string()),
            "yaml" => serde_saphyr::from_str::<Value>(&block.text)
                .err()
                .map(|e| e.to_string()),
            "sh" | "ini" => continue,
            other => panic!("a block of {other:?} below {:?}", block.heading),
        };
        assert_eq!(error, None, "{}", block.text);
        parsed += 1;
    }
    assert!(parsed >= 9, "{parsed} blocks");
}

#[test]
fn blocks_name_devices_of_classes() {
    let mut names = 0;
    for block in blocks() {
        for (start, _) in block.text.match_indices("nodedock.dev/") {
            let of_name = |c: char| c.is_ascii_alphanumeric() || "/=._-".contains(c);
            let name = &block.text[start..];
            let end = name.find(|c: char| !of_name(c)).unwrap_or(name.len());
            assert_device(&name[..end]);
            names += 1;
        }
    }
    assert!(names >= 10, "{names} names");
}

/// What the page uses of a file of GitLab Runner, with the names and types of its `common/config.go`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GitlabConfig {
    runners: Vec<GitlabRunner>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GitlabRunner {
    executor: String,
    limit: usize,
    docker: GitlabDocker,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GitlabDocker {
    image: String,
    runtime: String,
    gpus: String,
    service_gpus: Option<String>,
}

#[test]
fn gitlab_configs_have_known_keys() {
    for text in texts("Docker executor", "toml") {
        let config: GitlabConfig = toml::from_str(&text).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.runners.len(), 1);
        for runner in config.runners {
            assert_eq!(runner.executor, "docker");
            assert!(runner.limit > 0 && !runner.docker.image.is_empty());
            assert_eq!(runner.docker.runtime, "nodedock");
            for gpus in [Some(runner.docker.gpus), runner.docker.service_gpus]
                .into_iter()
                .flatten()
            {
                let device = gpus.strip_prefix("driver=cdi,device=");
                assert_device(device.unwrap_or_else(|| panic!("{gpus}")));
            }
        }
    }
}

/// A job of `.gitlab-ci.yml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GitlabJob {
    tags: Vec<String>,
    script: Vec<String>,
}

#[test]
fn gitlab_jobs_have_known_commands() {
    for text in texts("Shell executor", "yaml") {
        let jobs: BTreeMap<String, GitlabJob> = yaml(&text);
        for job in jobs.values() {
            assert_eq!(job.tags.len(), 1);
            assert!(job.script.iter().any(|line| check_command(line)), "{text}");
        }
    }
}

/// What the page uses of a workflow of GitHub.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GithubWorkflow {
    jobs: BTreeMap<String, GithubJob>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GithubJob {
    #[serde(rename = "runs-on")]
    runs_on: Vec<String>,
    container: Option<GithubContainer>,
    #[serde(default)]
    services: BTreeMap<String, GithubContainer>,
    steps: Vec<GithubStep>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GithubContainer {
    image: String,
    options: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GithubStep {
    run: String,
}

#[test]
fn github_jobs_have_known_keys() {
    let mut containers = 0;
    for text in texts("Jobs in containers", "yaml") {
        let workflow: GithubWorkflow = yaml(&text);
        for job in workflow.jobs.into_values() {
            assert_eq!(job.runs_on[0], "self-hosted");
            assert!(!job.steps.is_empty());
            for container in job.container.into_iter().chain(job.services.into_values()) {
                assert!(!container.image.is_empty());
                let options: Vec<_> = container.options.split_whitespace().collect();
                let ["--runtime", "nodedock", "--device", device] = options[..] else {
                    panic!("{options:?}");
                };
                assert_device(device);
                containers += 1;
            }
        }
    }
    assert_eq!(containers, 2);
}

#[test]
fn github_steps_have_known_commands() {
    for text in texts("Jobs without containers", "yaml") {
        let workflow: GithubWorkflow = yaml(&text);
        for job in workflow.jobs.values() {
            assert!(job.container.is_none() && job.services.is_empty());
            assert!(
                job.steps.iter().any(|step| check_command(&step.run)),
                "{text}"
            );
        }
    }
}
