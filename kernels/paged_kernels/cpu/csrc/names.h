// Names of a level: every level is compiled from the same sources.
#pragma once

#define NAMED(what, name) NAMED_(what, name)
#define NAMED_(what, name) what##_##name
#define QUOTED(name) QUOTED_(name)
#define QUOTED_(name) #name
