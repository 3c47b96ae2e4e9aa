//! Work that runs inside the script that makes the mark.

use super::super::RedisStore;
use super::super::reply::odd;
use super::super::script::script;
use super::{MOST, Told, columns, receipt, word};
use crate::stuck::Stuck;
use crate::{Arrival, Error, InboxRules, Receipt, Work};

/// What a store on Redis says of SQL.
const NO_SQL: &str =
    "a store on Redis runs no SQL: give this consumer a `script`, `http` or `command` handler";

script!(
    PROCESS: "../prelude.lua", "../append.lua", "../send.lua", "../acknowledge.lua", "desk.lua", "versions.lua",
    "process.lua"
);
script!(CHECK: "../prelude.lua", "check.lua");

impl RedisStore {
    pub(super) async fn check_work(&self, work: &Work) -> Result<(), Error> {
        match work {
            Work::Mark => Ok(()),
            Work::Sql(_) => Err(Error::Refused(NO_SQL.to_owned())),
            Work::Script(code) => {
                let mut call = self.script(&CHECK);
                call.arg(code);
                match self.read(&call).await?.text()?.as_str() {
                    "" => Ok(()),
                    wrong => Err(Error::Refused(format!(
                        "the handler's script does not compile: {wrong}; it is Lua 5.1 and sees the table `message`"
                    ))),
                }
            }
        }
    }

    pub(super) async fn work(
        &self,
        group: &str,
        arrivals: &[Arrival],
        work: &Work,
        rules: &InboxRules,
    ) -> Result<Vec<Receipt>, Error> {
        let (kind, code) = match work {
            Work::Mark => ("mark", ""),
            Work::Script(code) => ("script", code.as_str()),
            Work::Sql(_) => return Err(Error::Refused(NO_SQL.to_owned())),
        };
        let mut receipts: Vec<Receipt> = Vec::with_capacity(arrivals.len());
        let mut stuck = Stuck::new(rules);
        for part in arrivals.chunks(MOST) {
            if let Some(unavailable @ Receipt::Unavailable { .. }) = receipts.last().cloned() {
                receipts.extend(part.iter().map(|_| unavailable.clone()));
                continue;
            }
            let mut call = self.desk(&PROCESS, group, rules);
            call.arg(kind).arg(code);
            // A script knows those of its own part.
            let asked = part.iter().filter(|arrival| !stuck.holds(arrival));
            let asked: Vec<_> = asked.map(|arrival| (arrival, Told::Whole)).collect();
            columns(&mut call, &asked, |_| {});
            let mut answers = self.write(&call).await?;
            let before = stuck.clone();
            for arrival in part {
                let receipt = match before.holds(arrival) {
                    true => Receipt::Busy,
                    false => receipt(word(answers.next().ok_or_else(|| odd("a receipt"))?)?)?,
                };
                stuck.note(arrival, &receipt);
                receipts.push(receipt);
            }
        }
        if kind == "script" {
            // It may have sent something.
            self.ring();
        }
        Ok(receipts)
    }
}
