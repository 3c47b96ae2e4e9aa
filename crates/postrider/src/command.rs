//! What can be typed, and what each of it does.

mod advise;
mod arguments;
mod backend;
mod contract;
mod dead;
mod doctor;
mod failure;
mod fit;
mod inboxes;
mod inspect;
mod lanes;
mod log;
mod output;
mod reconcile;
mod schema;
mod send;
mod serve;
mod settings;
mod world;

use std::process::ExitCode;

use clap::Parser;

use self::arguments::{Arguments, Command, ConfigCommand, Dead, Global, Lanes, Serve};
use self::failure::{Exit, Failure};
use self::output::Output;
use crate::config::{self, Loaded};

/// Who is written into the audit for what is done here.
const ACTOR: &str = "command";

/// Runs the command line and answers its exit code.
pub(crate) fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are no mistakes, and clap knows where each belongs. A closed pipe is nobody's either.
            let _ = error.print();
            return if error.use_stderr() { Exit::Usage.into() } else { ExitCode::SUCCESS };
        }
    };
    let mut output = Output::new(arguments.global.json);
    match run(arguments, &mut output).and_then(|()| output.flush()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            output.failure(&failure);
            failure.exit.into()
        }
    }
}

fn run(arguments: Arguments, output: &mut Output) -> Result<(), Failure> {
    let Arguments { global, command } = arguments;
    let command = command.unwrap_or_else(|| Command::Serve(Serve::default()));
    if let Command::Completions { shell } = command {
        return arguments::completions(shell, output);
    }
    let loaded = config::load(global.config.as_deref(), std::env::vars_os().filter_map(text_pair))?;
    log::start(&loaded.config.log, &global, matches!(command, Command::Serve(_)))?;
    match command {
        Command::Advise(answers) => return advise::advise(&answers, &loaded, output),
        Command::Config { command: ConfigCommand::Show } => return settings::show(&loaded, output),
        Command::Routes => return settings::routes(&loaded.config, output),
        Command::Schema { print: true } => return schema::print(&loaded.config, output),
        _ => {}
    }
    // Two threads: the work is the disk's, and idle threads cost memory.
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Exit::Unexpected, format!("cannot start: {error}")))?
        .block_on(run_on_store(command, loaded, output))
}

async fn run_on_store(command: Command, loaded: Loaded, output: &mut Output) -> Result<(), Failure> {
    let config = &loaded.config;
    match command {
        Command::Serve(options) => Box::pin(serve::serve(loaded, options, output)).await,
        Command::Send(options) => send::send(&world::make_desk(config).await?, options, output).await,
        Command::Status { id } => {
            inspect::status(&world::open_desk(config).await?, id.as_deref(), output).await
        }
        Command::List(options) => inspect::list(&world::open_desk(config).await?, options, output).await,
        Command::Dead { command } => match command {
            Dead::List(options) => dead::list(&world::open_desk(config).await?, options, output).await,
            Dead::Show { id, group } => {
                dead::show(&world::open_desk(config).await?, &id, group.as_deref(), output).await
            }
            Dead::Requeue(which) => {
                dead::mend(&world::open_desk(config).await?, dead::Action::Requeue, which, output).await
            }
            Dead::Discard(which) => {
                dead::mend(&world::open_desk(config).await?, dead::Action::Discard, which, output).await
            }
            Dead::Edit(edit) => dead::edit(&world::open_desk(config).await?, edit, output).await,
        },
        Command::Lanes { command } => match command {
            None => lanes::show(&world::open_desk(config).await?, output).await,
            Some(Lanes::Set { count }) => lanes::set(&world::make_desk(config).await?, count, output).await,
        },
        Command::Config { command: ConfigCommand::Check } => settings::check(&loaded, output),
        Command::Contract { markdown } => contract::show(config, markdown, output).await,
        Command::Doctor => doctor::examine(config, output).await,
        Command::Reconcile(options) => reconcile::reconcile(config, options, output).await,
        Command::Migrate { dry_run } => schema::migrate(config, dry_run, output).await,
        Command::Schema { .. } => schema::state(config, output).await,
        Command::Config { .. } | Command::Routes | Command::Advise(_) | Command::Completions { .. } => Ok(()),
    }
}

/// Variables that are not Unicode cannot be settings, whatever their name.
fn text_pair((name, value): (std::ffi::OsString, std::ffi::OsString)) -> Option<(String, String)> {
    Some((name.into_string().ok()?, value.into_string().ok()?))
}
